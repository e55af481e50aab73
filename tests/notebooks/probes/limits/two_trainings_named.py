# expect: refused R2
# says: cell 1: `first.train()`
# says: cell 2: `second.train()`
# cause: the message lists the trainings
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
ds = load_dataset("trl-lib/Capybara", split="train")
first = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", max_steps=5))
second = SFTTrainer("Qwen/Qwen2.5-1.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="p", max_steps=5))
# %%
first.train()
# %%
second.train()
