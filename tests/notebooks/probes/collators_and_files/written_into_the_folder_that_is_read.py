# expect: converted
# has: to_json(
# cause: a file that is written into the folder that is read
# %%
import json, os
from pathlib import Path
import pandas as pd
from datasets import Dataset, load_dataset, load_from_disk
df = pd.read_csv("pairs.csv")
df["text"] = df["question"] + " " + df["answer"]
Dataset.from_pandas(df).to_json("data/rows.jsonl")
train = load_dataset("data", split="train")
# %%
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
tokenizer = AutoTokenizer.from_pretrained("acme/base")
model = AutoModelForCausalLM.from_pretrained("acme/base")
trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=train, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
