# expect: refused R5
# says: for lr in (1e-4, 1e-5)
# cause: a cell after the training that cannot be parsed, and trains once more
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
ds = load_dataset("trl-lib/Capybara", split="train")
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", max_steps=5))
trainer.train()
# %%
for lr in (1e-4, 1e-5)
    trainer.args.learning_rate = lr
    trainer.train()
