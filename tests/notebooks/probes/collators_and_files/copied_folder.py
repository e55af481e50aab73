# expect: converted
# has: if PartialState().is_local_main_process
# cause: a folder is copied before training; several ranks at once would fail
# %%
import shutil
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
shutil.copytree("/content/drive/rows", "rows")
ds = load_dataset("json", data_files="rows/train.jsonl", split="train")
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
