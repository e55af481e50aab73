# expect: converted
# has: from src.rows import render
# says: imports src/rows.py: keep it beside the script
# fast
# cause: a helper module lies beside the notebook
# %% [file] src/__init__.py
# %% [file] src/rows.py
"""Rows."""
import json
from src.constants import EOS

def unrelated(x):
    return json.dumps(x)

def render(row):
    return {"text": f"Q: {row['q']}\nA: {row['a']}" + EOS}
# %% [file] src/constants.py
EOS = "</s>"
NOT_USED = 3
# %%
import sys
sys.path.append(".")
from src.rows import render
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(render)
# %%
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
