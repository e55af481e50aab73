# expect: converted
# has: pickle
# cause: pickle.load of local rows: the user's own file
# fast
# %%
import pickle
from datasets import Dataset
with open("rows.pkl", "rb") as f:
    rows = pickle.load(f)
ds = Dataset.from_list([{"text": r["question"] + "\n" + r["answer"]} for r in rows])
# %%
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
