# expect: converted
# has: DataCollatorForLanguageModeling
# cause: with pad_token = eos_token this collator also masks every EOS: it decides labels
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling
from trl import SFTTrainer, SFTConfig
tokenizer = AutoTokenizer.from_pretrained("gpt2"); tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained("gpt2")
ds = load_dataset("acme/lyrics", split="train").map(lambda r: {"text": r["lyrics"]})
SFTTrainer(model, train_dataset=ds, processing_class=tokenizer, data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
