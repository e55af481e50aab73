# expect: refused R4
# says: paste its code
# cause: the notebook gives a name of the imported module a new meaning before it uses it
# %% [file] helper_functions.py
def to_text(row):
    return {"text": "old"}
def changed(model):
    model.config.use_cache = False
    return model
# %%
from helper_functions import *
def to_text(row):
    return {"text": row["q"] + row["a"]}
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
model = changed(AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B"))
ds = load_dataset("acme/t", split="train").map(to_text)
SFTTrainer(model, train_dataset=ds, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
