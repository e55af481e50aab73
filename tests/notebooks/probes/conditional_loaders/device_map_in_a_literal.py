# expect: converted
# hasnot: "auto"
# hasnot: "balanced"
# cause: as before, in a literal and by a key
# %%
import torch
from datasets import load_dataset
from transformers import AutoTokenizer, AutoModelForImageTextToText
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
options = {"torch_dtype": torch.bfloat16, "device_map": "auto"}
if torch.cuda.device_count() > 1:
    options["device_map"] = "balanced"
model = AutoModelForImageTextToText.from_pretrained("google/gemma-3-4b-pt", **options)
tokenizer = AutoTokenizer.from_pretrained("google/gemma-3-4b-it")
ds = load_dataset("acme/sql", split="train").map(lambda r: {"messages": [{"role": "user", "content": r["q"]}, {"role": "assistant", "content": r["a"]}]})
trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=ds, peft_config=LoraConfig(target_modules="all-linear"), args=SFTConfig(output_dir="o"))
trainer.train()
