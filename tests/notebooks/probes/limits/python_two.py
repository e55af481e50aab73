# expect: refused R5
# cause: Python 2 print
# %%
from datasets import load_dataset
from trl import SFTTrainer
print "starting"
ds = load_dataset("acme/t", split="train")
# %%
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds).train()
