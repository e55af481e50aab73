# expect: converted
# has: paragraph
# cause: padding side and pad token set in several cells, before and after the data
# %%
from transformers import AutoTokenizer, AutoModelForCausalLM
import torch
tokenizer = AutoTokenizer.from_pretrained("tiiuae/falcon-rw-1b", use_fast=True)
tokenizer.padding_side = "right"
# %%
from datasets import load_dataset
dataset = load_dataset("acme/laws-de", split="train")
dataset = dataset.map(lambda z: {"text": z["paragraph"] + tokenizer.eos_token})  # Satzende nicht vergessen
# %%
if tokenizer.pad_token is None:
    tokenizer.add_special_tokens({"pad_token": tokenizer.eos_token})
tokenizer.model_max_length = 1024
# %%
from peft import LoraConfig
from trl import SFTTrainer, SFTConfig
model = AutoModelForCausalLM.from_pretrained("tiiuae/falcon-rw-1b", torch_dtype=torch.bfloat16)
trainer = SFTTrainer(model=model, train_dataset=dataset, processing_class=tokenizer, peft_config=LoraConfig(r=8),
                     args=SFTConfig(output_dir="gesetze", dataset_text_field="text", max_length=1024))
trainer.train()
