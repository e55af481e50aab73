# expect: converted
# cause: a check that only raises: nothing trains in the other branch
# %%
import os
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
ds = load_dataset("trl-lib/Capybara", split="train")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-1.7B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-1.7B")
# %%
rank, rate = 16, 1e-4
if len(ds) == 0:
    raise ValueError("no rows")
assert "messages" in ds.column_names, "wrong data"
# %%
peft_config = LoraConfig(r=rank, target_modules="all-linear")
args = SFTConfig(output_dir="o", max_steps=10, learning_rate=rate)
trainer = SFTTrainer(model=model, args=args, train_dataset=ds, processing_class=tokenizer, peft_config=peft_config)
trainer.train()
