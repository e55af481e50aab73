# expect: converted
# cause: `if last_checkpoint: train(resume) else: train()` is one training
# %%
import os
from datasets import load_dataset
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, args=SFTConfig(output_dir="ck", dataset_text_field="text"))
last = get_last_checkpoint("ck") if os.path.isdir("ck") else None
if last:
    trainer.train(resume_from_checkpoint=last)
else:
    trainer.train()
