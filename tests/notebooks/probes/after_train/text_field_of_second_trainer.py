# expect: converted
# cause: the trainer that trains has no text field; a later one for perplexity has
# %%
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
ds = Dataset.from_list([{"prompt": "a", "completion": " b"}, {"prompt": "c", "completion": " d"}])
trainer = SFTTrainer("EleutherAI/pythia-70m", train_dataset=ds, args=SFTConfig(output_dir="one"))
trainer.train()
# %%
plain = ds.map(lambda r: {"text": r["prompt"] + r["completion"]}, remove_columns=["prompt", "completion"])
ppl = SFTTrainer(trainer.model, train_dataset=plain, eval_dataset=plain, args=SFTConfig(output_dir="two", dataset_text_field="text", packing=True))
print(ppl.evaluate()["eval_loss"])
