# expect: refused R1
# cause: transformers.Trainer with a causal LM: not SFTTrainer
# %%
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, DataCollatorForLanguageModeling
from datasets import load_dataset
tok = AutoTokenizer.from_pretrained("gpt2"); tok.pad_token = tok.eos_token
model = AutoModelForCausalLM.from_pretrained("gpt2")
ds = load_dataset("acme/t", split="train").map(lambda r: tok(r["text"]), batched=True)
Trainer(model=model, args=TrainingArguments("o"), train_dataset=ds, data_collator=DataCollatorForLanguageModeling(tok, mlm=False)).train()
