# expect: converted
# says: ~/models
# cause: expanduser and a home folder
# %%
from pathlib import Path
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(), args=SFTConfig(output_dir="~/models/run1", dataset_text_field="text"))
trainer.train()
