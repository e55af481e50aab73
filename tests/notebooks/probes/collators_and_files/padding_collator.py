# expect: converted
# cause: DataCollatorForLanguageModeling(mlm=False) only pads, as the pad token is not a token of the texts
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling
from trl import SFTTrainer, SFTConfig
name = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
tokenizer = AutoTokenizer.from_pretrained(name); tokenizer.pad_token = tokenizer.unk_token
model = AutoModelForCausalLM.from_pretrained(name)
ds = load_dataset("acme/lyrics", split="train").map(lambda r: {"text": r["lyrics"]})
SFTTrainer(model, train_dataset=ds, processing_class=tokenizer, data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
