# expect: converted
# says: wget -q https://example.com/data.json
# says: run it first
# cause: the data file comes from wget
# %%
!wget -q https://example.com/data.json -O data.json
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
ds = load_dataset("json", data_files="data.json", split="train")
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, args=SFTConfig(output_dir="o")).train()
