# expect: refused R4
# cause: a number that somebody types in
# %%
steps = int(input("How many steps? "))
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=load_dataset("acme/t", split="train"), args=SFTConfig(output_dir="o", max_steps=steps)).train()
