# expect: converted
# cause: a hub set with several possible columns, and remove_columns of a computed list
# %%
from datasets import load_dataset
ds = load_dataset("acme/mixed", split="train")
ds = ds.remove_columns([c for c in ds.column_names if c not in ("messages", "prompt", "completion", "text")])
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
SFTTrainer("Qwen/Qwen2.5-0.5B-Instruct", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o")).train()
