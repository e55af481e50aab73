# expect: converted
# hasnot: display(
# cause: IPython's display() has no import
# %%
import pandas as pd
import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
def show_rows(dataset):
    rows = []
    for i in range(3):
        rows.append({"question": dataset[i]["question"]})
    display(pd.DataFrame(rows))
    return dataset
ds = show_rows(load_dataset("gsm8k", "main", split="train"))
rank = 8 if torch.cuda.mem_get_info()[0] < 2e10 else 32
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=rank), args=SFTConfig(output_dir="o", dataset_text_field="question")).train()
