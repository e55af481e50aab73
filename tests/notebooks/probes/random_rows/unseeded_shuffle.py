# expect: converted
# has: set_seed(
# has: random.shuffle
# cause: random.shuffle without a seed: rows must not differ between ranks, so they are made once
# %%
import json, random
from datasets import Dataset
base = [{"q": f"What is {i} squared?", "a": str(i * i)} for i in range(300)]
random.shuffle(base)
split = int(0.9 * len(base))
fmt = lambda x: {"text": f"<s>[INST] {x['q']} [/INST] {x['a']} </s>"}
train_ds, val_ds = Dataset.from_list(list(map(fmt, base[:split]))), Dataset.from_list(list(map(fmt, base[split:])))
# %%
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
SFTTrainer("mistralai/Mistral-7B-v0.1", train_dataset=train_ds, eval_dataset=val_ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="sq", dataset_text_field="text")).train()
