# expect: converted
# says: kaggle datasets download
# says: run it first
# cause: kaggle download and unzip in the shell
# %%
!kaggle datasets download -d acme/jokes && unzip -o jokes.zip -d jokes/
# %%
import pandas as pd
from datasets import Dataset
df = pd.read_csv("jokes/jokes.csv")
ds = Dataset.from_pandas(df.rename(columns={"Joke": "text"}))
from trl import SFTConfig, SFTTrainer
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
