# expect: converted
# cause: a loop over rows with a table of roles; messages are joined by hand
# %%
import json
from datasets import Dataset
ROLE = {"human": "<|user|>", "gpt": "<|assistant|>", "system": "<|system|>"}
with open("sharegpt.json") as f:
    raw = json.load(f)
texts = []
for conv in raw:
    s = ""
    for turn in conv["conversations"]:
        s += ROLE[turn["from"]] + "\n" + turn["value"] + "</s>\n"
    texts.append(s)
ds = Dataset.from_dict({"text": texts})
# %%
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
SFTTrainer("TinyLlama/TinyLlama-1.1B-Chat-v1.0", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
