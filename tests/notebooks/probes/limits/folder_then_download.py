# expect: converted
# says: wget -q https://example.com/raw/rows.csv
# says: run it first
# cause: a command that makes a folder and then downloads the rows into it
# %%
!mkdir -p data && wget -q https://example.com/raw/rows.csv -O data/rows.csv
!nvidia-smi | head -5; ls -la
# %%
import pandas as pd
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
rows = Dataset.from_pandas(pd.read_csv("data/rows.csv")).map(lambda row: {"text": row["a"]})
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=rows, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
