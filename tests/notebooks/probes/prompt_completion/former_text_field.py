# expect: converted
# cause: the text field as the trainer's own argument, beside columns that TRL now reads first
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from peft import LoraConfig
from trl import SFTTrainer
name = "meta-llama/Llama-2-7b-hf"
model = AutoModelForCausalLM.from_pretrained(name, load_in_4bit=True)
tok = AutoTokenizer.from_pretrained(name)
rows = load_dataset("acme/pairs", split="train")
rows = rows.map(lambda r: {"formatted": f"### Q: {r['prompt']}\n### A: {r['completion']}"})
trainer = SFTTrainer(model=model, train_dataset=rows, dataset_text_field="formatted", max_seq_length=512, tokenizer=tok,
                     peft_config=LoraConfig(r=16), args=TrainingArguments("o", max_steps=20))
trainer.train()
