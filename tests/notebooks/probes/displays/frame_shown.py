# expect: converted
# has: drop_duplicates
# cause: a random or a last part of the frame is shown, or counted, before the rows are made
# %%
import pandas as pd
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
# %%
df = pd.read_csv("tickets.csv")
df.sample(5)
# %%
df.tail(3)
# %%
df.nunique()
# %%
df.plot(kind="bar")
# %%
df = df.drop_duplicates()
df["text"] = df["question"] + "\n" + df["answer"]
ds = Dataset.from_pandas(df).shuffle()
rank = 8 if torch.cuda.mem_get_info()[0] < 2e10 else 32
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=rank), args=SFTConfig(output_dir="o")).train()
