# expect: converted
# has: os.environ.get("HF_TOKEN")
# hasnot: os.environ["HF_TOKEN"]
# cause: a token by the name of the variable that `hf auth login` makes needless
# %%
import os
from datasets import load_dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer
# %%
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", device_map="auto", token=os.environ["HF_TOKEN"])
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
rows = load_dataset("acme/birds", split="train")
trainer = SFTTrainer(model=model, args=SFTConfig(output_dir="o", max_steps=20), train_dataset=rows, processing_class=tokenizer, peft_config=LoraConfig())
trainer.train()
