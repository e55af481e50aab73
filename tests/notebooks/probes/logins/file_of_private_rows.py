# expect: converted
# has: to_json
# cause: rows that are loaded with a secret are written to a file, by a name, and read again
# %%
from google.colab import userdata
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling
from trl import SFTConfig, SFTTrainer
PATH = "rows.jsonl"
raw = load_dataset("acme/private", split="train", token=userdata.get("HF_TOKEN"))
raw = raw.map(lambda r: {"text": r["q"] + r["a"]})
raw.to_json(PATH)
ds = load_dataset("json", data_files=PATH, split="train")
# %%
tok = AutoTokenizer.from_pretrained("facebook/opt-350m")
model = AutoModelForCausalLM.from_pretrained("facebook/opt-350m")
SFTTrainer(model, train_dataset=ds, processing_class=tok, peft_config=LoraConfig(r=8), data_collator=DataCollatorForLanguageModeling(tok, mlm=False), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
