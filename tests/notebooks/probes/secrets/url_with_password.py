# expect: converted
# has: read_csv
# cause: a password in the URL of the data, and basic authentication
# %%
import pandas as pd, requests
from datasets import Dataset
url = "https://alice:@PASSWORD@@files.example.com/rows.csv"
df = pd.read_csv(url)
df["text"] = df["a"]
ds = Dataset.from_pandas(df[["text"]])
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
