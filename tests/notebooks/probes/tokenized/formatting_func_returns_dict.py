# expect: converted
# cause: a function for batches that returns {"text": [...]} is given as formatting_func
# has: dataset.map(to_text, batched=True)
# %%
from unsloth import FastLanguageModel, is_bfloat16_supported
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/gemma-2b-bnb-4bit", max_seq_length=1024, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16)
def to_text(examples):
    return {"text": [f"{a} -> {b}" + tokenizer.eos_token for a, b in zip(examples["input"], examples["output"])]}
from datasets import load_dataset
dataset = load_dataset("acme/pairs", split="train")
dataset = dataset.map(to_text, batched=True)
from trl import SFTTrainer
from transformers import TrainingArguments
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=dataset, dataset_text_field="text", max_seq_length=1024,
    args=TrainingArguments(per_device_train_batch_size=2, max_steps=60, fp16=not is_bfloat16_supported(), bf16=is_bfloat16_supported(), output_dir="outputs"))
trainer.train()
