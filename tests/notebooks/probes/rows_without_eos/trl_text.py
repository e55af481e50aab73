# expect: converted
# cause: texts without EOS with TRL and transformers: TRL appends it, and so does the package
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
data = load_dataset("acme/qa", split="train").map(lambda r: {"text": r["question"] + "\n" + r["answer"]})
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=data, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="outputs", dataset_text_field="text")).train()
