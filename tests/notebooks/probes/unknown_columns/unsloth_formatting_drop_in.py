# expect: converted
# has: formatting_func=as_text
# cause: Unsloth ignores formatting_func if the rows have the text field
# %%
import torch
from datasets import load_dataset
from transformers import TrainingArguments
from trl import SFTTrainer
from unsloth import FastLanguageModel
rank = 8 if torch.cuda.mem_get_info()[0] < 2e10 else 32
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Llama-3.2-1B-Instruct", max_seq_length=2048, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=rank, target_modules=["q_proj", "k_proj"], lora_alpha=16)
# %%
def as_text(example):
    return {"text": [q + a + tokenizer.eos_token for q, a in zip(example["question"], example["answer"])]}
ds = load_dataset("org/tickets", split="train").map(as_text, batched=True)
trainer = SFTTrainer(
    model=model, tokenizer=tokenizer, train_dataset=ds, dataset_text_field="text", max_seq_length=2048,
    formatting_func=as_text, args=TrainingArguments(output_dir="o"),
)
trainer.train()
