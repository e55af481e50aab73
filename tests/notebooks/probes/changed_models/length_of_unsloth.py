# expect: converted
# cause: model.max_seq_length changed; SFTTrainer takes the length of the rows from it, as Unsloth's does
# has: model.max_seq_length = 256
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
model.max_seq_length = 256
# %%
dataset = load_dataset("acme/answers", split="train")
EOS = tokenizer.eos_token
def fmt(examples):
    return {"text": [f"Q: {q}\nA: {a}" + EOS for q, a in zip(examples["question"], examples["answer"])]}
dataset = dataset.map(fmt, batched=True)
# %%
args = TrainingArguments(per_device_train_batch_size=2, gradient_accumulation_steps=4, warmup_steps=5, max_steps=60, learning_rate=2e-4, fp16=not is_bfloat16_supported(), bf16=is_bfloat16_supported(), logging_steps=1, optim="adamw_8bit", weight_decay=0.01, lr_scheduler_type="linear", seed=3407, output_dir="outputs")
# %%
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=dataset, dataset_text_field="text", dataset_num_proc=2, packing=False, args=args)
# %%
trainer.train()
# %%
model.save_pretrained("lora_model")
