# expect: refused R2
# says: the same trainer trains again
# cause: training goes on after an interruption, in a second cell
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
config = SFTConfig(output_dir="o", dataset_text_field="text", max_steps=10)
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=config)
# %%
trainer.train()
# %%
trainer.train(resume_from_checkpoint=True)
# %%
trainer.save_model("o")
