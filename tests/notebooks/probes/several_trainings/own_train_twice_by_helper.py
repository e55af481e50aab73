# expect: refused R2
# cause: a trainer made by a function is trained twice; a class of the notebook has a method train() too
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
class Index:
    def train(self, rows):
        return len(rows)
def make(rate):
    return SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", max_steps=5, learning_rate=rate))
ds = load_dataset("trl-lib/Capybara", split="train")
# %%
first = make(1e-4)
first.train()
# %%
second = make(1e-5)
second.train()
