# expect: refused R2
# cause: a class that trains is used for two models
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
class Tuner:
    def __init__(self, name):
        self.name = name
    def fit(self, rows):
        tr = SFTTrainer(self.name, train_dataset=rows, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text"))
        tr.train()
rows = load_dataset("acme/t", split="train").map(lambda r: {"text": r["q"] + r["a"]})
Tuner("Qwen/Qwen2.5-0.5B").fit(rows)
Tuner("Qwen/Qwen2.5-1.5B").fit(rows)
