# expect: converted
# has: os.environ["TOKENIZERS_PARALLELISM"] = "false"
# hasnot: WORLD_SIZE
# hasnot: LOCAL_RANK
# hasnot: destroy_process_group
# cause: a function sets the variables of the launcher, and ends its processes
# %%
import os
import torch
import torch.distributed as dist
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
# %%
def set_up():
    os.environ["RANK"] = "0"
    os.environ["WORLD_SIZE"] = "1"
    os.environ.pop("LOCAL_RANK", None)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if dist.is_initialized():
        dist.destroy_process_group()
    return "tickets"
# %%
name = set_up()
ds = load_dataset(f"org/{name}", split="train").map(lambda row: {"text": row["body"]})
rank = 8 if torch.cuda.mem_get_info()[0] < 2e10 else 32
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=rank), args=SFTConfig(output_dir="o")).train()
