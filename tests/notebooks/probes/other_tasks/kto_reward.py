# expect: refused R1
# cause: KTO by module attribute
# %%
import trl
from datasets import load_dataset
cfg = trl.KTOConfig(output_dir="kto")
trl.KTOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", args=cfg, train_dataset=load_dataset("trl-lib/kto-mix-14k", split="train")).train()
