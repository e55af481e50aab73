# expect: refused R4
# says: os.popen
# cause: a command's output decides on the rows
# %%
import os
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
def count():
    return int(os.popen("pip list | wc -l").read())
ds = load_dataset("acme/t", split="train").select(range(count()))
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
