# expect: converted
# hasnot: push_to_hub(
# cause: angle brackets and upper-case words are placeholders, also in a dict of settings
# %%
CFG = {"repo": "<your-hf-name>/<model-name>", "private": True}
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="p", dataset_text_field="text", max_steps=50))
trainer.train()
trainer.push_to_hub(CFG["repo"])
trainer.model.push_to_hub(CFG["repo"], private=CFG["private"])
