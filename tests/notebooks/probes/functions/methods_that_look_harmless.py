# expect: converted
# has: box.filter()
# has: box.strip(rows)
# has: ds.map(lambda row: texts.append(row["body"]))
# cause: methods of the notebook's own classes have names of displays; a map fills a list
# %%
import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
# %%
class Box:
    def __init__(self, rows):
        self.rows = rows
    def filter(self):
        self.rows = [row for row in self.rows if row["text"]]
    def strip(self, rows):
        for row in rows:
            row["text"] = row["text"].strip()
# %%
rows = [{"text": f" row {n}"} for n in range(200)]
box = Box(rows)
box.filter()
box.strip(rows)
ds = load_dataset("org/tickets", split="train")
texts = []
ds.map(lambda row: texts.append(row["body"]))
print(len(texts))
rows = box.rows + [{"text": text} for text in texts]
rank = 8 if torch.cuda.mem_get_info()[0] < 2e10 else 32
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=Dataset.from_list(rows), peft_config=LoraConfig(r=rank), args=SFTConfig(output_dir="o")).train()
