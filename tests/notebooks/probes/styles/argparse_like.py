# expect: converted
# cause: argparse with a list of arguments, as in a script that became a notebook
# %%
import argparse
p = argparse.ArgumentParser()
p.add_argument("--model", default="google/gemma-2-2b")
p.add_argument("--seed", type=int, default=1)
p.add_argument("--lr", type=float, default=1e-4)
args = p.parse_args(["--seed", "99"])
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
SFTTrainer(args.model, train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text", seed=args.seed, learning_rate=args.lr)).train()
