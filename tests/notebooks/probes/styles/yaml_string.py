# expect: converted
# cause: settings as a YAML text in the notebook
# %%
import yaml
CONFIG = """
model: Qwen/Qwen2.5-1.5B
training:
  learning_rate: 5.0e-5
  lr_scheduler_type: cosine
  num_train_epochs: 2
lora: {r: 8, lora_alpha: 16}
"""
cfg = yaml.safe_load(CONFIG)
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer(cfg["model"], train_dataset=ds, peft_config=LoraConfig(**cfg["lora"]), args=SFTConfig(output_dir="y", dataset_text_field="text", **cfg["training"]))
trainer.train()
