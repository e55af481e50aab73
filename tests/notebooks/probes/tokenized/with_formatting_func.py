# expect: converted
# has: formatting_func=fmt
# has: rows.map(
# cause: token ids beside a function: SFTTrainer says that TRL takes the ids
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
def fmt(row):
    return row["text"]
rows = rows.map(lambda row: tokenizer(row["text"]))
trainer = SFTTrainer(model=model, args=SFTConfig(output_dir="o", max_steps=20), train_dataset=rows, processing_class=tokenizer, peft_config=LoraConfig(), formatting_func=fmt)
trainer.train()
