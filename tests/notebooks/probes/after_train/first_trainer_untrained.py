# expect: converted
# cause: a first trainer is only made to look at its batches; the second one trains
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
look = SFTTrainer("EleutherAI/pythia-70m", train_dataset=ds, args=SFTConfig(output_dir="look", dataset_text_field="text", max_steps=1))
print(next(iter(look.get_train_dataloader())))
# %%
trainer = SFTTrainer("EleutherAI/pythia-70m", train_dataset=ds, args=SFTConfig(output_dir="real", dataset_text_field="text", max_steps=300, learning_rate=1e-5))
trainer.train()
