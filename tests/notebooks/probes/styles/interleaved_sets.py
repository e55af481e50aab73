# expect: converted
# has: interleave_datasets
# cause: several sets are interleaved and concatenated
# %%
from datasets import load_dataset, concatenate_datasets, interleave_datasets
a = load_dataset("acme/a", split="train").map(lambda r: {"text": r["x"]}).select_columns(["text"])
b = load_dataset("acme/b", "en", split="train").map(lambda r: {"text": r["y"]}).select_columns(["text"])
c = load_dataset("csv", data_files=["c1.csv", "c2.csv"], split="train").rename_column("body", "text").select_columns(["text"])
mix = interleave_datasets([concatenate_datasets([a, c]), b], probabilities=[0.7, 0.3], seed=42)
# %%
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
SFTTrainer("google/gemma-2b", train_dataset=mix, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
