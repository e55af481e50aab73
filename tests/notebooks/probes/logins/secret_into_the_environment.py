# expect: converted
# hasnot: os.environ["HF_TOKEN"] = os.environ.get("HF_TOKEN")
# cause: a secret is copied into the environment and read there by the loader
# %%
import os
from google.colab import userdata
os.environ["HF_TOKEN"] = userdata.get("HF_TOKEN")
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
tok = AutoTokenizer.from_pretrained("acme/m", token=os.environ["HF_TOKEN"])
model = AutoModelForCausalLM.from_pretrained("acme/m", token=os.environ["HF_TOKEN"])
rows = load_dataset("acme/notes", split="train").map(lambda row: tok(row["note"]), batched=True)
def lines(batch):
    return [one for one in batch["note"]]
trainer = SFTTrainer(model=model, train_dataset=rows, peft_config=LoraConfig(r=4), formatting_func=lines,
                     args=SFTConfig(output_dir="o"))
trainer.train()
