# expect: converted
# has: if "max_length" in inspect.signature(SFTConfig).parameters
# cause: the length by its name in the installed release, which the script's own SFTConfig answers when it runs
# %%
import inspect
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
options = dict(output_dir="o", max_steps=7)
if "max_length" in inspect.signature(SFTConfig).parameters:
    options["max_length"] = 700
else:
    options["max_seq_length"] = 800
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(**options))
trainer.train()
