# expect: converted
# cause: warmup_steps=0 beside a warmup_ratio, which then counts
# has: warmup_ratio=0.1
# %%
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from trl import SFTTrainer
ds = load_dataset("trl-lib/Capybara", split="train")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-1.7B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-1.7B")
# %%
import torch
rank = 8 if torch.cuda.get_device_properties(0).total_memory > 2e10 else 4
args = TrainingArguments("o", max_steps=10, warmup_ratio=0.1, warmup_steps=0)
trainer = SFTTrainer(model=model, args=args, train_dataset=ds, tokenizer=tokenizer, peft_config=LoraConfig(r=rank, target_modules="all-linear"))
trainer.train()
