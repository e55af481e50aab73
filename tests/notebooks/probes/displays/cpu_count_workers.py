# expect: converted
# has: desc=
# cause: num_proc=cpu_count() in map decides no rows
# %%
from multiprocessing import cpu_count
import os
from datasets import load_dataset
ds = load_dataset("acme/t", split="train")
def render(row, sep):
    row["text"] = row["q"] + sep + row["a"]
    return row
ds = ds.map(render, num_proc=cpu_count(), fn_kwargs={"sep": "\n"}, remove_columns=["q", "a"], desc="rendering")
ds = ds.filter(lambda r: len(r["text"]) > 5, num_proc=os.cpu_count() // 2)
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
