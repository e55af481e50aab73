# expect: converted
# cause: Llama's own marks are a known text
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
mark = "<<SYS>>"
if "<<" in mark and mark.endswith(">>"):
    rank = 8
# %%
peft_config = LoraConfig(r=rank, target_modules="all-linear")
args = SFTConfig(output_dir="o", max_steps=10, learning_rate=rate)
trainer = SFTTrainer(model=model, args=args, train_dataset=ds, processing_class=tokenizer, peft_config=peft_config)
trainer.train()
