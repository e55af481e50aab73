# expect: refused R4
# says: helpers
# says: to_csv
# says: paste its code
# cause: a module beside the notebook writes a file
# %% [file] helpers.py
import pandas as pd

def to_text(row):
    pd.DataFrame([row]).to_csv("seen.csv")
    return {"text": row["q"]}
# %%
from helpers import to_text
# %%
import os
from datasets import load_dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer
# %%
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
rows = load_dataset("acme/birds", split="train")
rows = rows.map(to_text)
trainer = SFTTrainer(model=model, args=SFTConfig(output_dir="o", max_steps=20), train_dataset=rows, processing_class=tokenizer, peft_config=LoraConfig())
trainer.train()
