# expect: converted
# cause: IPython takes a bare `pip install` or `ls` for a magic
# %%
pip install -q trl peft
# %%

pip install -U datasets

# %%
ls
# %%
cd /content
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
ds = load_dataset("trl-lib/Capybara", split="train")
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", max_steps=5))
trainer.train()
# %%
ls o
