# expect: converted
# cause: prepare_model_for_int8_training, the former name of prepare_model_for_kbit_training; both are imported
# %%
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_int8_training, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainingArguments
from trl import SFTTrainer

tokenizer = AutoTokenizer.from_pretrained("acme/base")
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained("acme/base", quantization_config=BitsAndBytesConfig(load_in_8bit=True))
# %%
# 8 bits
model = prepare_model_for_int8_training(model)
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
rows = load_dataset("acme/notes", split="train").map(lambda row: {"text": row["note"]})
trainer = SFTTrainer(model=model, train_dataset=rows, dataset_text_field="text", tokenizer=tokenizer, max_seq_length=256, args=TrainingArguments(output_dir="o", max_steps=9))
trainer.train()
