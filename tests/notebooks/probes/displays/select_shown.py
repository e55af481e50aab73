# expect: converted
# cause: rows that are selected only to display them
# %%
import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
ds = load_dataset("gsm8k", "main", split="train")
# %%
ds.select(range(min(5, len(ds))))
# %%
ds.filter(lambda row: len(row["question"]) > 500).to_pandas()
# %%
ds = ds.map(lambda row: {"text": row["question"]})
rank = 8 if torch.cuda.mem_get_info()[0] < 2e10 else 32
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=rank), args=SFTConfig(output_dir="o")).train()
