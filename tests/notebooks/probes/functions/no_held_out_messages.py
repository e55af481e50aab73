# expect: converted
# has: eval_dataset=held_out
# cause: held-out rows that may be None, where the rows may have both the text field and messages
# %%
from unsloth import FastLanguageModel
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

model, tokenizer = FastLanguageModel.from_pretrained("acme/base", max_seq_length=512)
model = FastLanguageModel.get_peft_model(model, r=8)
rows = load_dataset("acme/notes", split="train")

def text(row):
    return {"text": tokenizer.apply_chat_template(row["messages"], tokenize=False)}

rows = rows.map(text)

def trainer_for(rows, folder, held_out=None):
    return SFTTrainer(model=model, processing_class=tokenizer, train_dataset=rows, eval_dataset=held_out, args=SFTConfig(output_dir=folder, dataset_text_field="text"))

def main():
    trainer = trainer_for(rows, "o")
    if len(rows) < 9:
        return
    trainer.train()

main()
