# expect: converted
# has: df.dropna(inplace=True)
# has: df.rename(columns={"q": "question"}, inplace=True)
# has: df["answer"].fillna("none", inplace=True)
# has: part.drop(columns=["id"], inplace=True)
# has: notes.dropna(inplace=True)
# hasnot: notes.head
# cause: `inplace=True` changes the frame: it is no display
# %%
import pandas as pd
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
# %%
notes = pd.read_csv("notes.csv")
notes.dropna(inplace=True)
notes.head()
# %%
df = pd.read_csv("tickets.csv")
df.dropna(inplace=True)
df.rename(columns={"q": "question"}, inplace=True)
df["answer"].fillna("none", inplace=True)
if df.duplicated().any():
    df.drop_duplicates(inplace=True)
more = pd.read_csv("more.csv")
for part in (df, more):
    part.drop(columns=["id"], inplace=True)
# %%
df = pd.concat([df, more])
df["text"] = df["question"] + "\n" + df["answer"]
ds = Dataset.from_pandas(df)
rank = 8 if torch.cuda.mem_get_info()[0] < 2e10 else 32
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=rank), args=SFTConfig(output_dir="o")).train()
