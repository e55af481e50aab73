# expect: converted
# has: /content/train.jsonl
# says: /content/train.jsonl is a path on a hosted service
# cause: the notebook changes its folder, so the two names are two files
# %%
import os
import pandas as pd
os.chdir("/content/drive/MyDrive")
df = pd.read_csv("pairs.csv")
df.head(5).to_json("train.jsonl", orient="records", lines=True)
# %%
from datasets import load_dataset
train = load_dataset("json", data_files="/content/train.jsonl", split="train")
train = train.map(lambda row: {"text": row["prompt"] + " " + row["response"]})
# %%
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
tokenizer = AutoTokenizer.from_pretrained("acme/base")
model = AutoModelForCausalLM.from_pretrained("acme/base")
trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=train, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
