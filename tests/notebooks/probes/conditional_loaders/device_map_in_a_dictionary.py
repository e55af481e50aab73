# expect: converted
# hasnot: "auto"
# cause: the loader's arguments are a dictionary that also spreads the model over all GPUs
# %%
import torch
from datasets import load_dataset
from transformers import AutoTokenizer, AutoModelForImageTextToText
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
model_kwargs = dict(torch_dtype=torch.bfloat16, device_map="auto")
model_kwargs["attn_implementation"] = "eager"
tok_kwargs = {"use_fast": True}
model = AutoModelForImageTextToText.from_pretrained("google/gemma-3-4b-pt", **model_kwargs)
tokenizer = AutoTokenizer.from_pretrained("google/gemma-3-4b-it", **tok_kwargs)
ds = load_dataset("acme/sql", split="train").map(lambda r: {"messages": [{"role": "user", "content": r["q"]}, {"role": "assistant", "content": r["a"]}]})
trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=ds, peft_config=LoraConfig(target_modules="all-linear"), args=SFTConfig(output_dir="o"))
trainer.train()
