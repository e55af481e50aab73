# expect: converted
# hasnot: rmtree
# cause: clean-up of the output folder before the training; a run never deletes anything
# %%
import shutil, os
output_dir = "./results_tinyllama"
if os.path.exists(output_dir):
    shutil.rmtree(output_dir)
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer("TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T", train_dataset=ds, peft_config=LoraConfig(r=8, lora_alpha=16), args=SFTConfig(output_dir=output_dir, dataset_text_field="text"))
trainer.train()
