# expect: converted
# has: df["answer"].fillna("none", inplace=True)
# cause: the stubs do not see the change of a column; silently wrong today
# %%
import pandas as pd
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
# %%
df = pd.read_csv("tickets.csv")
df["answer"].fillna("none", inplace=True)
df["text"] = df["question"] + "\n" + df["answer"]
ds = Dataset.from_pandas(df)
rank = 8 if torch.cuda.mem_get_info()[0] < 2e10 else 32
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=rank), args=SFTConfig(output_dir="o")).train()
