# expect: converted
# has: merge_and_unload
# cause: an alias of trainer.model is merged after the training, under a condition
# %%
DEMO = False
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
# %%
if not DEMO:
    peft_model = trainer.model
    merged = peft_model.merge_and_unload()
    merged.save_pretrained("merged")
    trainer.processing_class.save_pretrained("merged")
