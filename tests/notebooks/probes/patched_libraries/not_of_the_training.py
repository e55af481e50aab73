# expect: converted
# has: torch.load = functools.partial(torch.load, weights_only=True)
# cause: a replaced function that no training calls
# %%
import functools
import torch
torch.load = functools.partial(torch.load, weights_only=True)
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
trainer = SFTTrainer(model=model, args=SFTConfig(output_dir="o", max_steps=20), train_dataset=rows, processing_class=tokenizer, peft_config=LoraConfig())
trainer.train()
