# expect: converted
# kept or named: push_to_hub("miriam-k/lyrics-lora"
# cause: a real account is no placeholder: the export is kept, or named as left out
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="p", dataset_text_field="text", max_steps=50))
trainer.train()
trainer.model.push_to_hub("miriam-k/lyrics-lora", private=True)
