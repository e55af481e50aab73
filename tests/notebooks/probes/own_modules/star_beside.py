# expect: refused R4
# says: paste its code
# cause: every name of a module beside the notebook
# %% [file] helper_functions.py
import re
__all__ = ["to_text", "shown"]
def clean(text):
    return re.sub(r"\s+", " ", text)
def to_text(row):
    return {"text": clean(row["q"]) + " " + clean(row["a"])}
def shown(row):
    print(row)
# %%
!wget https://example.com/raw/helper_functions.py
from helper_functions import *
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(to_text)
shown(ds[0])
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
