# expect: converted
# cause: columns by add_column and select_columns, and the old text field of a copied config
# %%
from datasets import load_dataset
ds = load_dataset("acme/titles", split="train")
ds = ds.add_column("prompt", [f"Title for: {b}\n" for b in ds["body"]])
ds = ds.add_column("completion", ds["title"]).select_columns(["prompt", "completion"])
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
SFTTrainer("google/gemma-2b", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="completion")).train()
