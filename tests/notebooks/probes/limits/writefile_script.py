# expect: refused R0|R4
# cause: the training is in a file that a cell writes and torchrun starts
# %%
%%writefile train.py
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=load_dataset("acme/t", split="train"), args=SFTConfig(output_dir="o")).train()
# %%
!torchrun --nproc_per_node 2 train.py
