# expect: converted
# has: set_seed(42)
# has: TrainingArguments(
# hasnot: SFTConfig
# cause: TrainingArguments with Unsloth keep the defaults of transformers, not those of Unsloth's SFTConfig
# %%
from datasets import load_dataset
from unsloth import FastLanguageModel
from transformers import TrainingArguments
from trl import SFTTrainer
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Llama-3.2-3B-Instruct", max_seq_length=2048, load_in_4bit=True)
if model.config.vocab_size > 100_000:
    rank = 32
else:
    rank = 16
model = FastLanguageModel.get_peft_model(model, r=rank)
ds = load_dataset("yahma/alpaca-cleaned", split="train").map(lambda row: {"text": row["output"] + tokenizer.eos_token})
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=ds, dataset_text_field="text", max_seq_length=1024,
    args=TrainingArguments(output_dir="o", max_steps=60, learning_rate=2e-4))
trainer.train()
