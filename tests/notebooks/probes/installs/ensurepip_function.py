# expect: converted
# hasnot: ensurepip
# cause: ensurepip and a helper that installs what is missing
# %%
import importlib, subprocess, sys, ensurepip
ensurepip.bootstrap()
def need(package, module=None):
    try:
        importlib.import_module(module or package)
    except ImportError:
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", package], check=True)
for p in ["datasets", "trl", "peft", "accelerate"]:
    need(p)
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
