# expect: converted
# has: rows = Rows(
# cause: the rows are a torch Dataset, which TRL does not take: SFTTrainer says so
# %%
import torch
from torch.utils.data import Dataset
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
tok = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
class Rows(Dataset):
    def __init__(self, texts):
        self.made = [tok(text, return_tensors="pt").input_ids[0] for text in texts]
    def __len__(self):
        return len(self.made)
    def __getitem__(self, n):
        return {"input_ids": self.made[n], "labels": self.made[n]}
# %%
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
rows = Rows(load_dataset("acme/t", split="train")["q"])
trainer = SFTTrainer(model, train_dataset=rows, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", max_steps=5))
trainer.train()
