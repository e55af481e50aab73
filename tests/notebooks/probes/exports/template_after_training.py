# expect: converted
# has: chat_template
# cause: a chat template set after the training and before save_pretrained is part of what is saved
# %%
from transformers import AutoModelForCausalLM, AutoTokenizer
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
tokenizer = AutoTokenizer.from_pretrained("google/gemma-2b")
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer("google/gemma-2b", processing_class=tokenizer, train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="p", dataset_text_field="text"))
trainer.train()
tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
trainer.model.save_pretrained("final")
tokenizer.save_pretrained("final")
