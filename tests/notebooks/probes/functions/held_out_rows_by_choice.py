# expect: converted
# has: eval_dataset=held_out
# cause: held-out rows that a condition chooses, with a tokenizer that is called elsewhere
# %%
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from trl import SFTTrainer

tokenizer = AutoTokenizer.from_pretrained("acme/base")
model = AutoModelForCausalLM.from_pretrained("acme/base")
rows = load_dataset("acme/notes", split="train").map(lambda row: {"text": row["note"], "size": len(tokenizer(row["note"])["input_ids"])})
parts = rows.train_test_split(test_size=0.1, seed=7) if len(rows) > 1000 else {"train": rows}
held_out = parts["test"] if "test" in parts else None

def main(rate):
    trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=parts["train"], eval_dataset=held_out, dataset_text_field="text", max_seq_length=512, peft_config=LoraConfig(r=8), args=TrainingArguments(output_dir="o", learning_rate=rate))
    if rate > 1:
        return
    trainer.train()

main(1e-4)
