# expect: converted
# has: if token else
# cause: the model depends on whether a token is set, which is only known at run time
# %%
import os
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
token = os.getenv("HF_TOKEN")
name = "meta-llama/Llama-3.2-1B" if token else "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
SFTTrainer(name, train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
