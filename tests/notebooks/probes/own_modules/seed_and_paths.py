# expect: converted
# hasnot: hf_login
# cause: a module's set_seed, a folder computed with Path, and a model that typing.cast is given
# %%
import os
import random
import numpy as np
import torch
from huggingface_hub import login

def hf_login() -> None:
    token = os.getenv("HF_TOKEN")
    if not token:
        raise Exception("Token is not set. Please save the token first.")
    login(token)
    print("Successfully logged in!")

def set_seed(seed: int):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
# %%
import sys
from pathlib import Path
from typing import cast
sys.path.append(str(Path().resolve()))
hf_login()
set_seed(5)
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import SFTConfig, SFTTrainer
adapter_path = Path().resolve().parent.parent / "saved_models" / "adapter"
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-1.7B")
ds = load_dataset("acme/t", split="train")
def preprocess(rows):
    found = {"input_ids": [], "attention_mask": [], "labels": []}
    for q, a in zip(rows["q"], rows["a"]):
        one, two = tokenizer(q)["input_ids"], tokenizer(a)["input_ids"]
        found["input_ids"].append(one + two)
        found["attention_mask"].append([1] * len(one + two))
        found["labels"].append([-100] * len(one) + two)
    return found
ds = ds.map(preprocess, batched=True, remove_columns=ds.column_names)
train, test = ds.train_test_split(test_size=0.1, seed=5).values()
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-1.7B", device_map="auto")
trainer = SFTTrainer(model=cast(PreTrainedModel, model), args=SFTConfig(output_dir="o", max_steps=9), train_dataset=train, eval_dataset=test)
trainer.train()
if False:
    model.save_pretrained(str(adapter_path))
