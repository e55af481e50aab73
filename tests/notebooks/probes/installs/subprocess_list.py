# expect: converted
# hasnot: subprocess.
# cause: pip by subprocess.run with a list
# fast
# %%
import subprocess, sys
subprocess.run(["pip", "install", "-q", "transformers==4.44.0", "trl", "peft"], check=True)
subprocess.check_call([sys.executable, "-m", "pip", "install", "bitsandbytes"])
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
