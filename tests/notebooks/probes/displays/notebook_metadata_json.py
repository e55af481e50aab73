# expect: converted
# hasnot: json.dump
# cause: the same with json, before the training
# %%
import json
path = "Finetune (final).ipynb"
with open(path, encoding="utf-8") as f:
    book = json.load(f)
if "widgets" in book.get("metadata", {}):
    del book["metadata"]["widgets"]
with open(path, "w", encoding="utf-8") as f:
    json.dump(book, f, indent=1)
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
