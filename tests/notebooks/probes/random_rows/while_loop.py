# expect: converted
# has: random
# cause: rows generated with `random` until there are enough: the stubs must end
# fast
# %%
import random
from datasets import Dataset
random.seed(0)
seen, rows = set(), []
while len(rows) < 2000:
    a, b = random.randint(0, 999), random.randint(0, 999)
    if (a, b) in seen:
        continue
    seen.add((a, b))
    rows.append({"prompt": f"{a} + {b} =", "completion": f" {a + b}"})
ds = Dataset.from_list(rows)
# %%
from trl import SFTConfig, SFTTrainer
SFTTrainer("HuggingFaceTB/SmolLM2-135M", train_dataset=ds, args=SFTConfig(output_dir="sums", max_length=32, per_device_train_batch_size=64)).train()
