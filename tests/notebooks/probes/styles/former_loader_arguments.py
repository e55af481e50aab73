# expect: converted
# cause: arguments that transformers 5 has no more
# has: token=True
# hasnot: use_auth_token
# hasnot: resume_download
# hasnot: load_in_4bit=True, quantization_config
# %%
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainingArguments
from trl import SFTTrainer
ds = load_dataset("trl-lib/Capybara", split="train")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-1.7B", use_auth_token=True)
model = AutoModelForCausalLM.from_pretrained(
    "Qwen/Qwen3-1.7B", load_in_4bit=True, quantization_config=BitsAndBytesConfig(load_in_4bit=True), use_auth_token=True,
    resume_download=True, load_in_8bit=False,
)
# %%
rank = 8 if torch.cuda.get_device_properties(0).total_memory > 2e10 else 4
trainer = SFTTrainer(
    model=model, args=TrainingArguments("o", max_steps=10), train_dataset=ds, tokenizer=tokenizer,
    peft_config=LoraConfig(r=rank, target_modules="all-linear"),
)
trainer.train()
