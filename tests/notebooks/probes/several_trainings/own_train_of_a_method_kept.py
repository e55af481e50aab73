# expect: refused R2
# cause: the method train of the trainer is called under another name; a class of the notebook has a method train() too
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
class Index:
    def train(self, rows):
        return len(rows)
ds = load_dataset("trl-lib/Capybara", split="train")
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", max_steps=5))
steps = {"run": trainer}
# %%
trainer.train()
# %%
again = steps["run"]
again.train()
