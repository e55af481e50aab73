# expect: converted
# has: to_csv("notes.csv"
# hasnot: /content/notes.csv
# cause: the other way around: written by the path on the service, read by the relative one
# %%
import pandas as pd
df = pd.read_csv("pairs.csv")
df["text"] = df["question"] + " " + df["answer"]
df[["text"]].to_csv("/content/notes.csv", index=False)
# %%
from datasets import load_dataset
train = load_dataset("csv", data_files="notes.csv", split="train")
# %%
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
tokenizer = AutoTokenizer.from_pretrained("acme/base")
model = AutoModelForCausalLM.from_pretrained("acme/base")
trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=train, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
