# expect: converted
# has: notes.jsonl
# has: json.dumps
# hasnot: /kaggle/working/notes.jsonl
# cause: the same on another service, with an open file and a name for the path
# %%
import json
from datasets import load_dataset
target = "./notes.jsonl"
raw = load_dataset("acme/notes", split="train")
with open(target, "w") as stream:
    for row in raw:
        stream.write(json.dumps({"text": row["note"].strip()}) + "\n")
# %%
train = load_dataset("json", data_files={"train": "/kaggle/working/notes.jsonl"}, split="train")
# %%
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
tokenizer = AutoTokenizer.from_pretrained("acme/base")
model = AutoModelForCausalLM.from_pretrained("acme/base")
trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=train, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
