# expect: converted
# hasnot: UserSecretsClient
# cause: Kaggle secrets, login and wandb.login in one cell
# %%
from kaggle_secrets import UserSecretsClient
from huggingface_hub import login
import wandb
secrets = UserSecretsClient()
login(token=secrets.get_secret("HUGGINGFACE_TOKEN"))
wandb.login(key=secrets.get_secret("wandb"))
# %%
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
m = "/kaggle/input/gemma/transformers/2b/2"
tokenizer = AutoTokenizer.from_pretrained(m)
model = AutoModelForCausalLM.from_pretrained(m, quantization_config=BitsAndBytesConfig(load_in_4bit=True), device_map="auto")
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer(model, train_dataset=ds, processing_class=tokenizer, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="/kaggle/working/gemma", dataset_text_field="text"))
trainer.train()
