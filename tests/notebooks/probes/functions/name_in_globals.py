# expect: converted
# cause: a value that is only computed if no earlier cell has done it
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
ds = load_dataset("gsm8k", "main", split="train")
if "rank" not in globals():
    rank = 8
if "ds" not in globals():
    ds = load_dataset("other/data", split="train")
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=rank), args=SFTConfig(output_dir="o", dataset_text_field="question")).train()
