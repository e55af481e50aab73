# expect: converted
# cause: rows from numpy's generator with choices and probabilities
# %%
import numpy as np
from datasets import Dataset
rng = np.random.default_rng(42)
names = ["Anna", "Ben", "Chen", "Dora"]
items = ["apples", "pears", "plums"]
def sample():
    who = rng.choice(names); what = rng.choice(items, p=[0.5, 0.3, 0.2]); n = int(rng.integers(1, 20))
    return {"prompt": f"{who} buys {n} {what}. How many?", "completion": f" {n}"}
ds = Dataset.from_list([sample() for _ in range(500)])
# %%
from trl import SFTConfig, SFTTrainer
SFTTrainer("HuggingFaceTB/SmolLM2-135M", train_dataset=ds, args=SFTConfig(output_dir="shop", max_steps=100)).train()
