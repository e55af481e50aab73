# expect: refused R2
# cause: a class has a method train(), and an object that is given a trainer trains it again
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
class Index:
    def train(self, rows):
        return len(rows)
class Again:
    def __init__(self, worker):
        self.worker = worker
    def go(self):
        return self.worker.train()
ds = load_dataset("trl-lib/Capybara", split="train")
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", max_steps=5))
# %%
trainer.train()
# %%
again = Again(trainer)
again.go()
