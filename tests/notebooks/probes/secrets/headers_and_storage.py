# expect: converted
# has: storage_options
# cause: storage options with AWS keys, an Authorization header, a bytes literal
# %%
from datasets import load_dataset
storage = {"key": "@AWS@", "secret": "@PASSWORD@"}
ds = load_dataset("parquet", data_files="s3://acme/rows.parquet", storage_options=storage, split="train")
HEADERS = {"Authorization": "Bearer @HF@"}
TOKEN = b"@HF@"
ds = ds.map(lambda r: {"text": r["a"]})
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
