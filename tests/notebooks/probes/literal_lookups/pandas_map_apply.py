# expect: converted
# has: groupby
# cause: pandas: replace by a dict, apply with axis, groupby sample
# %%
import pandas as pd
from datasets import Dataset
df = pd.read_csv("https://example.com/reviews.csv", names=["stars", "title", "body"])
names = {1: "awful", 2: "bad", 3: "fine", 4: "good", 5: "great"}
df["label"] = df["stars"].map(names)
df = df.groupby("label").sample(n=200, random_state=1).reset_index(drop=True)
df["text"] = df.apply(lambda r: f"{r['title']}\n{r['body']}\n=> {r['label']}", axis=1)
train = Dataset.from_pandas(df[["text"]])
# %%
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
SFTTrainer("google/gemma-2b", train_dataset=train, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
