# expect: converted
# has: to_json(
# cause: rows whose path is in a table of settings where they are written
# %%
import json, os
from pathlib import Path
import pandas as pd
from datasets import Dataset, load_dataset, load_from_disk
df = pd.read_csv("pairs.csv")
df["text"] = df["question"] + " " + df["answer"]
PATHS = {"train": "rows.jsonl"}
df.to_json(PATHS["train"], orient="records", lines=True)
train = load_dataset("json", data_files="rows.jsonl", split="train")
# %%
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
tokenizer = AutoTokenizer.from_pretrained("acme/base")
model = AutoModelForCausalLM.from_pretrained("acme/base")
trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=train, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
