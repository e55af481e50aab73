# expect: converted
# hasnot: autoremove
# cause: packages are removed with a command of their own, as a magic, in a function
# %%
import os
def prepare():
    if os.getcwd() == "/kaggle/working":
        %pip install pip3-autoremove
        %pip-autoremove torch torchvision -y
        %pip install torch
    else:
        print("local")
prepare()
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
