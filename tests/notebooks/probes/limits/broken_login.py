# expect: refused R5
# says: login(token=)
# cause: a token that was cut out before the notebook was published: the message names the line
# %%
from huggingface_hub import login
login(token=)
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
ds = load_dataset("trl-lib/Capybara", split="train")
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", max_steps=5)).train()
