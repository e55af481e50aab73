# expect: converted
# kept or named: merge
# cause: a statement that only takes trainer.model before the training must not leave an empty function
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text"))
# run with tracking:
# with mlflow.start_run():
trainer.train()
# %%
# the adapter that is in the trainer
peft_model = trainer.model  # PeftModel
merged = peft_model.merge_and_unload()
# %%
merged.save_pretrained("o/merged")
