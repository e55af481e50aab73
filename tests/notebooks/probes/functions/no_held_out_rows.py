# expect: converted
# has: eval_dataset=held_out
# cause: held-out rows that are a parameter, None in the only call, beside the trainer's former text field
# %%
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from trl import SFTTrainer

tokenizer = AutoTokenizer.from_pretrained("acme/base")
model = AutoModelForCausalLM.from_pretrained("acme/base")
rows = load_dataset("acme/notes", split="train").map(lambda row: {"text": row["note"]})

def trainer_for(model, rows, folder, held_out=None):
    return SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=rows, eval_dataset=held_out, dataset_text_field="text", max_seq_length=512, peft_config=LoraConfig(r=8), args=TrainingArguments(output_dir=folder))

# %%
def main():
    trainer = trainer_for(model, rows, "o", held_out=None)
    if len(rows) < 9:
        return
    trainer.train()

main()
