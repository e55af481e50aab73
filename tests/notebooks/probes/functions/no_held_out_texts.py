# expect: converted
# has: eval_dataset=held_out
# cause: held-out rows that may be None, beside a formatting_func that returns the texts of a batch
# %%
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

tokenizer = AutoTokenizer.from_pretrained("acme/base")
model = AutoModelForCausalLM.from_pretrained("acme/base")
rows = load_dataset("acme/notes", split="train")

def texts(batch):
    found = []
    for note in batch["note"]:
        found.append(note + tokenizer.eos_token)
    return found

def trainer_for(rows, folder, held_out=None):
    return SFTTrainer(model=model, processing_class=tokenizer, train_dataset=rows, eval_dataset=held_out, formatting_func=texts, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir=folder))

def main():
    trainer = trainer_for(rows, "o")
    if len(rows) < 9:
        return
    trainer.train()

main()
