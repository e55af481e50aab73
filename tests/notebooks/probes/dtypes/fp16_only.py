# expect: converted
# cause: fp16=True without a dtype asks for half precision
# %%
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from peft import LoraConfig
from trl import SFTTrainer
from datasets import load_dataset
model = AutoModelForCausalLM.from_pretrained("EleutherAI/gpt-neo-1.3B")
tokenizer = AutoTokenizer.from_pretrained("EleutherAI/gpt-neo-1.3B")
tokenizer.pad_token = tokenizer.eos_token
data = load_dataset("imdb", split="train[:10%]").map(lambda r: {"text": r["text"][:500]})
trainer = SFTTrainer(model=model, train_dataset=data, dataset_text_field="text", max_seq_length=256, tokenizer=tokenizer,
                     peft_config=LoraConfig(r=8, lora_alpha=16), args=TrainingArguments("neo", fp16=True, per_device_train_batch_size=4))
trainer.train()
