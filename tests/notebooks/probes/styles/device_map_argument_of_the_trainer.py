# expect: refused
# says: device_map
# cause: SFTTrainer never had an argument device_map; the message says to remove it
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
ds = load_dataset("trl-lib/Capybara", split="train")
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), device_map="auto", args=SFTConfig(output_dir="o", max_steps=5))
trainer.train()
