# expect: converted
# has: FastLanguageModel.from_pretrained
# cause: get_peft_model(model=base): the base is not another model
# %%
from unsloth import FastLanguageModel
from datasets import load_dataset
from transformers import DataCollatorForLanguageModeling
from trl import SFTConfig, SFTTrainer
base, tokenizer = FastLanguageModel.from_pretrained("unsloth/gemma-2-2b-it", max_seq_length=1024, load_in_4bit=True)
adapted = FastLanguageModel.get_peft_model(model=base, r=8, lora_alpha=16)
ds = load_dataset("acme/med", split="train").map(lambda r: tokenizer(r["q"] + r["a"]), remove_columns=["q", "a"])
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
SFTTrainer(model=adapted, processing_class=tokenizer, train_dataset=ds, data_collator=collator, args=SFTConfig(output_dir="o", max_steps=9)).train()
