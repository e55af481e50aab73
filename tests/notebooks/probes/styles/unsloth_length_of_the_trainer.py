# expect: converted
# cause: max_seq_length=1024 on the trainer is TRL's default length for max_length, and Unsloth still takes it
# %%
from datasets import load_dataset
from unsloth import FastLanguageModel
from transformers import TrainingArguments
from trl import SFTTrainer
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Llama-3.2-3B-Instruct", max_seq_length=2048, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16)
ds = load_dataset("yahma/alpaca-cleaned", split="train").map(lambda row: {"text": row["output"] + tokenizer.eos_token})
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=ds, dataset_text_field="text", max_seq_length=1024,
    args=TrainingArguments(output_dir="o", max_steps=60, learning_rate=2e-4))
trainer.train()
