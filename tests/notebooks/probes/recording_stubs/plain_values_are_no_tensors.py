# expect: converted
# cause: settings pass a helper that also takes tensors, data sets or text
# %%
import torch
import numpy as np
import datasets
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
def plain(value):
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.item()
    if isinstance(value, datasets.Dataset):
        return value[0]
    return value
ds = datasets.load_dataset("acme/t", split="train").map(lambda r: {"text": r["q"]})
# %%
rate, rank = plain(2e-4), plain(8)
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=rank), args=SFTConfig(output_dir="o", max_steps=5, learning_rate=rate))
trainer.train()
