# expect: converted
# has: from prompts import TEMPLATE as T
# says: imports prompts.py
# cause: a module beside the notebook acts when it is imported, and is a program as well
# %% [file] prompts.py
import argparse
import os
os.environ["TOKENIZERS_PARALLELISM"] = "false"
TEMPLATE = "### {q}\n{a}"
def main():
    argparse.ArgumentParser().parse_args()
if __name__ == "__main__":
    main()
# %%
from prompts import TEMPLATE as T
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": T.format(**r)})
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
