# expect: converted
# cause: `tokens = tokenizer(...); return tokens` makes token ids
# %%
import torch
from transformers import AutoTokenizer
checkpoint = "HuggingFaceTB/SmolLM2-360M"
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
from datasets import load_dataset
ds = load_dataset("acme/recipes", split="train")
def preprocess(batch):
    joined = [t + "\n" + b for t, b in zip(batch["title"], batch["body"])]
    tokens = tokenizer(joined, truncation=True, max_length=512, padding=False)
    return tokens
ds = ds.map(preprocess, batched=True, remove_columns=ds.column_names)
# %%
from transformers import AutoModelForCausalLM
from trl import SFTTrainer, SFTConfig
from peft import LoraConfig, get_peft_model
model = get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), LoraConfig(r=8, target_modules="all-linear"))
trainer = SFTTrainer(model=model, args=SFTConfig(output_dir="recipes", max_length=512), train_dataset=ds)
trainer.train()
