# expect: converted
# cause: train() of another object beside a training that becomes a drop-in script
# %%
import faiss
import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
rank = 8 if torch.cuda.mem_get_info()[0] < 2e10 else 32
ds = load_dataset("trl-lib/Capybara", split="train")
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=rank), args=SFTConfig(output_dir="o", max_steps=5))
trainer.train()
# %%
groups = faiss.Kmeans(768, 20, niter=20)
groups.train(vectors)
