# expect: converted
# fast
# cause: a helper opens what is no open file yet: isinstance() of a plain text and a class of a library
# %%
import io
import json
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
def as_file(f, mode="r"):
    if not isinstance(f, io.IOBase):
        f = open(f, mode=mode)
    return f
def jload(f, mode="r"):
    f = as_file(f, mode)
    rows = json.load(f)
    f.close()
    return rows
# %%
rows = jload("data/train.json")
ds = Dataset.from_list([{"text": row["q"] + row["a"]} for row in rows])
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", max_steps=5))
trainer.train()
