# expect: refused R2
# says: the same trainer trains again
# cause: the last checkpoint is looked for by a function; the cell was run twice
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
config = SFTConfig(output_dir="o", dataset_text_field="text", max_steps=10)
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=config)
# %%
from transformers.trainer_utils import get_last_checkpoint
trainer.train()
last = get_last_checkpoint(config.output_dir)
# %%
trainer.train(resume_from_checkpoint=last)
# %%
trainer.train(resume_from_checkpoint=get_last_checkpoint("o"))
