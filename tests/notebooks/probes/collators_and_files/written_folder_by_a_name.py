# expect: converted
# has: save_to_disk(
# cause: a folder of rows that is saved by a name and loaded by its path
# %%
import json, os
from pathlib import Path
import pandas as pd
from datasets import Dataset, load_dataset, load_from_disk
df = pd.read_csv("pairs.csv")
df["text"] = df["question"] + " " + df["answer"]
out = "rows"
Dataset.from_pandas(df).save_to_disk(out)
train = load_from_disk("./rows")
# %%
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
tokenizer = AutoTokenizer.from_pretrained("acme/base")
model = AutoModelForCausalLM.from_pretrained("acme/base")
trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=train, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
