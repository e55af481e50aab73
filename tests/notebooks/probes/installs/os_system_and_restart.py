# expect: converted
# hasnot: os.system
# hasnot: os.kill
# cause: os.system("pip install ...") and a restart of the runtime
# %%
import os
os.system("pip install -U -q trl peft bitsandbytes > /dev/null 2>&1")
# %%
import IPython
IPython.Application.instance().kernel.do_shutdown(True)  # restart
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
