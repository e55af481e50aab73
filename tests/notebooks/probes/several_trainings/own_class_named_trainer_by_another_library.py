# expect: refused R1
# cause: a class named like a trainer derives from transformers' Trainer, by an alias
# %%
import transformers
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
Base = transformers.Trainer
class WeightedTrainer(Base):
    def compute_loss(self, model, inputs, **more):
        return 2 * model(**inputs).loss
ds = load_dataset("trl-lib/Capybara", split="train")
trainer = WeightedTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, args=SFTConfig(output_dir="o"))
trainer.train()
