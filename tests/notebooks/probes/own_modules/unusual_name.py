# expect: refused R4
# says: rowmaker
# cause: a module of the repository, by a name that no list has, found through sys.path
# %%
import sys
sys.path.insert(0, "../lib")
import rowmaker
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=rowmaker.rows(), peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
