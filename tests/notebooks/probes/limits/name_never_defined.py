# expect: refused R4
# says: no cell defines `EarlyStop`
# cause: a name of a cell that was deleted before the notebook was published
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), callbacks=[EarlyStop(3)], args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
