# expect: refused R2
# cause: the same trainer is trained twice, with other arguments between
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
ds = load_dataset("acme/t", split="train")
t = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, args=SFTConfig(output_dir="o", max_steps=10))
t.train()
t.args.learning_rate = 1e-6
t.train(resume_from_checkpoint=True)
