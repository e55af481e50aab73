# expect: converted
# has: read_pickle
# has: joblib.load
# cause: pandas.read_pickle and joblib.load
# %%
import pandas as pd, joblib
from datasets import Dataset
df = pd.read_pickle("frame.pkl")
extra = joblib.load("extra.joblib")
df = pd.concat([df, pd.DataFrame(extra)])
df["text"] = df["q"] + " " + df["a"]
ds = Dataset.from_pandas(df)
# %%
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
