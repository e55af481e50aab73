# expect: refused R4
# says: utils
# cause: a module of the repository is not there
# %%
import sys
sys.path.append("../src")
from utils.prompting import build_prompt
from utils import seed_all
# %%
from datasets import load_dataset
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": build_prompt(r)})
from trl import SFTConfig, SFTTrainer
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
