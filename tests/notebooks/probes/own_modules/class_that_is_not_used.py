# expect: converted
# has: from tools.prompts import to_text
# says: imports tools/prompts.py: keep it beside the script
# cause: a module beside the notebook loads a model in a class that the notebook does not use
# %% [file] tools/prompts.py
import re

from transformers import AutoModelForCausalLM

SPACES = re.compile(r"\s+")


def clean(text):
    return SPACES.sub(" ", text)


def to_text(row):
    return {"text": clean(row["q"])}


class Server:
    def __init__(self, name):
        self.model = AutoModelForCausalLM.from_pretrained(name)
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
from tools.prompts import to_text
# %%
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
rows = load_dataset("acme/birds", split="train").map(to_text)
args = SFTConfig(output_dir="out", max_steps=20)
trainer = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
trainer.train()
