# expect: converted
# cause: get_peft_model and peft_config, which TRL refuses today
# has: peft_config=
# has: get_peft_model(model, config)
# %%
import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from trl import SFTTrainer
ds = load_dataset("trl-lib/Capybara", split="train")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-1.7B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-1.7B")
# %%
rank = 8 if torch.cuda.get_device_properties(0).total_memory > 2e10 else 4
config = LoraConfig(r=rank, target_modules="all-linear")
model = get_peft_model(model, config)
# %%
trainer = SFTTrainer(model=model, args=TrainingArguments("o", max_steps=10), train_dataset=ds, tokenizer=tokenizer, peft_config=config)
trainer.train()
