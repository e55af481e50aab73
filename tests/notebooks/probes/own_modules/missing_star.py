# expect: refused R4
# says: helper_functions
# cause: every name of a module that is not there
# %%
from helper_functions import *
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(to_text)
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
