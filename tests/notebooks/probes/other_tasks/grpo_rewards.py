# expect: refused R1
# cause: GRPO with rewards
# %%
from trl import GRPOConfig, GRPOTrainer
from datasets import load_dataset
def reward_len(completions, **kwargs):
    return [-abs(20 - len(c)) for c in completions]
GRPOTrainer(model="Qwen/Qwen2-0.5B-Instruct", reward_funcs=reward_len, args=GRPOConfig(output_dir="g"), train_dataset=load_dataset("trl-lib/tldr", split="train")).train()
