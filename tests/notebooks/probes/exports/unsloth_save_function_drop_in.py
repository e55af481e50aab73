# expect: converted
# has: unsloth_save_model(model, tokenizer, "packed"
# cause: the same in the drop-in form: rows are tokenized beside a function for batches
# %%
from unsloth import FastLanguageModel, unsloth_save_model
from datasets import load_dataset
from huggingface_hub import HfApi
from trl import SFTConfig, SFTTrainer
model, tokenizer = FastLanguageModel.from_pretrained("acme/m", max_seq_length=512)
model = FastLanguageModel.get_peft_model(model, r=8)
rows = load_dataset("acme/notes", split="train").map(lambda row: tokenizer(row["note"], truncation=True, max_length=512))
def notes(batch):
    return [one for one in batch["note"]]
trainer = SFTTrainer(model=model, train_dataset=rows, formatting_func=notes, args=SFTConfig(output_dir="o", max_length=512))
trainer.train()
# %%
unsloth_save_model(model, tokenizer, "packed", push_to_hub=False, token=None)
