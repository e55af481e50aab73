# expect: converted
# has: "Answer:"
# cause: the notebook defines a function twice, as the next cell needs it
# %%
from tqdm import tqdm
from datasets import Dataset, load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
# %%
def create_prompt(text, label=None):
    return f"Classify: {text} Answer: {label}"

def create_rows(rows):
    return [{"text": create_prompt(r["body"], r["label"])} for r in tqdm(rows)]
train = create_rows(load_dataset("org/x", split="train"))
# %%
def create_prompt(text, label=None):
    return f"Classify: {text} " + "Answer:"
test = create_rows(load_dataset("org/x", split="test"))
# %%
rank = 8
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=Dataset.from_list(train), eval_dataset=Dataset.from_list(test), peft_config=LoraConfig(r=rank), args=SFTConfig(output_dir="o")).train()
