# expect: refused R4
# says: paste its code
# says: src.data
# cause: a module that is not there makes the rows
# %%
from src.data import load_rows
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=load_rows("train"), peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
