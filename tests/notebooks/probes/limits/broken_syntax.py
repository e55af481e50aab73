# expect: refused R5
# cause: a cell does not parse: the author left dots and a bracket open
# fast
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
ds = load_dataset("acme/t", split="train")
# %%
args = SFTConfig(output_dir="o", learning_rate= , max_steps=...
# %%
t = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, args=args)
t.train()
