# expect: converted
# has: to_json("train.jsonl"
# has: sample(
# hasnot: /content/train.jsonl
# says: /content/train.jsonl
# cause: rows that are written by a relative path and read by the path that the file has on a hosted service
# %%
import pandas as pd
df = pd.read_csv("pairs.csv")
train_df = df.sample(frac=0.9, random_state=42)
train_df.to_json("train.jsonl", orient="records", lines=True)
# %%
from datasets import load_dataset
train = load_dataset("json", data_files="/content/train.jsonl", split="train")
train = train.map(lambda rows: {"text": [p + " " + r for p, r in zip(rows["prompt"], rows["response"])]}, batched=True)
# %%
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
tokenizer = AutoTokenizer.from_pretrained("acme/base")
model = AutoModelForCausalLM.from_pretrained("acme/base")
trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=train, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
