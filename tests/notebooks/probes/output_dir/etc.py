# expect: converted
# says: /etc/finetuned
# cause: a hostile or careless absolute output folder must not pass without a note
# fast
# %%
import os
OUT = "/etc/finetuned"
os.makedirs("/etc/finetuned", exist_ok=True)
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(), args=SFTConfig(OUT, dataset_text_field="text"))
trainer.train()
