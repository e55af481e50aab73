# expect: converted
# has: Gemma3ForConditionalGeneration.from_pretrained
# cause: a model that also reads images, by the name of its own class, trained on text with a tokenizer
# fast
# %%
import torch
from datasets import load_dataset
from transformers import AutoTokenizer, Gemma3ForConditionalGeneration, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
model = Gemma3ForConditionalGeneration.from_pretrained("google/gemma-3-4b-it", quantization_config=BitsAndBytesConfig(load_in_4bit=True), device_map="auto")
tokenizer = AutoTokenizer.from_pretrained("google/gemma-3-4b-it")
ds = load_dataset("acme/calls", split="train").map(lambda r: {"text": tokenizer.apply_chat_template([{"role": "user", "content": r["q"]}, {"role": "assistant", "content": r["a"]}], tokenize=False)})
trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=ds, peft_config=LoraConfig(r=16, target_modules="all-linear"), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
