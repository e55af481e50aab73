# expect: converted
# has: os.environ["TOKENIZERS_PARALLELISM"] = "false"
# hasnot: WORLD_SIZE
# cause: the variables of the launcher are set at once, with others: each rank would be the only one; silently wrong today
# %%
import os
os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "TOKENIZERS_PARALLELISM": "false"})
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="9994")
# %%
import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
ds = load_dataset("org/tickets", split="train").map(lambda row: {"text": row["body"]})
rank = 8 if torch.cuda.mem_get_info()[0] < 2e10 else 32
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=rank), args=SFTConfig(output_dir="o")).train()
