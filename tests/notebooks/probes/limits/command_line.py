# expect: converted
# has: args = parser.parse_args()
# has: learning_rate=args.lr
# cause: the options of a script stay options
# %%
import argparse
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
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-4)
args = parser.parse_args()
trainer = SFTTrainer(model=model, args=SFTConfig(output_dir="o", max_steps=20, learning_rate=args.lr), train_dataset=rows, processing_class=tokenizer, peft_config=LoraConfig())
trainer.train()
