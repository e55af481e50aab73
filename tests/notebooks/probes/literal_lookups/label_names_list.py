# expect: converted
# has: CATEGORIES
# cause: class names by index of a list, and by features
# %%
from datasets import load_dataset
ds = load_dataset("ag_news", split="train[:5%]")
names = ds.features["label"].names
CATEGORIES = ["World", "Sports", "Business", "Sci/Tech"]
lines = [f"{t}\nCategory: {CATEGORIES[l]}" for t, l in zip(ds["text"], ds["label"])]
ds = ds.add_column("prompted", lines)
# %%
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="prompted")).train()
