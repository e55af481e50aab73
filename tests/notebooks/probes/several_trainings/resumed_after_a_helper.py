# expect: refused R2
# cause: a function changes the trainer before the training continues
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
config = SFTConfig(output_dir="o", dataset_text_field="text", max_steps=10)
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=config)
def longer():
    trainer.args.max_steps = 30
# %%
trainer.train()
longer()
# %%
trainer.train(resume_from_checkpoint=True)
