# expect: converted
# has: rng.shuffle(rows)
# has: generator.shuffle(more)
# cause: a generator of the notebook's own shuffles the rows in place; silently wrong today
# %%
import json
import random
import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
# %%
rows = [{"text": json.loads(line)["text"]} for line in open("rows.jsonl")]
rng = random.Random(42)
rng.shuffle(rows)
more = [{"text": f"row {n}"} for n in range(200)]
generator = np.random.default_rng(3)
generator.shuffle(more)
ds = Dataset.from_list(rows[:100] + more[:50])
rank = 8 if torch.cuda.mem_get_info()[0] < 2e10 else 32
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=rank), args=SFTConfig(output_dir="o")).train()
