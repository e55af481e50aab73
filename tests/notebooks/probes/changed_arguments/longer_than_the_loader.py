# expect: converted
# cause: SFTConfig max_seq_length bigger
# %%
from unsloth import FastLanguageModel, is_bfloat16_supported
import torch
from datasets import load_dataset
from trl import SFTTrainer, SFTConfig
from transformers import TrainingArguments
# %%
max_seq_length = 1024
model, tokenizer = FastLanguageModel.from_pretrained(model_name="unsloth/Llama-3.2-1B-Instruct", max_seq_length=max_seq_length, dtype=None, load_in_4bit=True)
# %%
model = FastLanguageModel.get_peft_model(model, r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], lora_alpha=16, lora_dropout=0, bias="none", use_gradient_checkpointing="unsloth", random_state=3407)
# %%
dataset = load_dataset("acme/answers", split="train")
EOS = tokenizer.eos_token
def fmt(examples):
    return {"text": [f"Q: {q}\nA: {a}" + EOS for q, a in zip(examples["question"], examples["answer"])]}
dataset = dataset.map(fmt, batched=True)
# %%
args = SFTConfig(per_device_train_batch_size=2, max_steps=60, max_seq_length=4096, output_dir="o", dataset_text_field="text", packing=True)
# %%
trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=dataset, args=args)
# %%
trainer.train()
# %%
model.save_pretrained("lora_model")
