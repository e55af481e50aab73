# expect: converted
# has: keep_short(100)
# cause: a function replaces the rows of the notebook, twice
# %%
import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
# %%
ds = load_dataset("org/tickets", split="train")
def keep_short(length):
    global ds
    ds = ds.filter(lambda row: len(row["text"]) < length)
keep_short(1000)
keep_short(100)
rank = 8 if torch.cuda.mem_get_info()[0] < 2e10 else 32
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=rank), args=SFTConfig(output_dir="o")).train()
