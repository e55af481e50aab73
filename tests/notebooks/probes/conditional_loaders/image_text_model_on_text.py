# expect: converted
# has: AutoModelForImageTextToText
# cause: the class of a model that also reads images, trained on text with a tokenizer
# %%
import torch
from datasets import load_dataset
from transformers import AutoTokenizer, AutoModelForImageTextToText, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
quant = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForImageTextToText.from_pretrained("google/gemma-3-4b-pt", quantization_config=quant, device_map="auto")
tokenizer = AutoTokenizer.from_pretrained("google/gemma-3-4b-it")
ds = load_dataset("acme/sql", split="train").map(lambda r: {"messages": [{"role": "user", "content": r["q"]}, {"role": "assistant", "content": r["a"]}]})
trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=ds, peft_config=LoraConfig(target_modules="all-linear"), args=SFTConfig(output_dir="o"))
trainer.train()
