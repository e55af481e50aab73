# expect: converted
# hasnot: get_ipython
# hasnot: pip.main
# cause: pip by get_ipython and by pip.main
# %%
get_ipython().system("pip install -q trl")
get_ipython().run_line_magic("pip", "install peft")
try:
    import bitsandbytes
except ModuleNotFoundError:
    import pip
    pip.main(["install", "bitsandbytes"])
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
