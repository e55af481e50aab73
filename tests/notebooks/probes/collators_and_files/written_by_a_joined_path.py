# expect: converted
# has: to_json(
# cause: rows whose path is joined where they are written, and whole where they are read
# %%
import json, os
from pathlib import Path
import pandas as pd
from datasets import Dataset, load_dataset, load_from_disk
df = pd.read_csv("pairs.csv")
df["text"] = df["question"] + " " + df["answer"]
folder = "data"
os.makedirs(folder, exist_ok=True)
df.to_json(os.path.join(folder, "rows.jsonl"), orient="records", lines=True)
train = load_dataset("json", data_files="data/rows.jsonl", split="train")
# %%
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
tokenizer = AutoTokenizer.from_pretrained("acme/base")
model = AutoModelForCausalLM.from_pretrained("acme/base")
trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=train, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
