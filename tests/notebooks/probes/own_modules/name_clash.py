# expect: converted
# has: from helpers import to_text
# has: SYSTEM = "You answer in English."
# cause: the module beside the notebook and the notebook give one name different values
# %% [file] helpers.py
SYSTEM = "You answer in French."
def to_text(row):
    return {"text": SYSTEM + row["q"] + row["a"]}
# %%
SYSTEM = "You answer in English."
from helpers import to_text
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(to_text)
print(SYSTEM)
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
