# expect: converted
# has: train_dataset=rows["train"]
# cause: a formatting function for batches beside rows that are tokenized: TRL trains on the token ids
# %%
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from trl import SFTTrainer
tok = AutoTokenizer.from_pretrained("acme/m")
model = AutoModelForCausalLM.from_pretrained("acme/m")
rows = load_dataset("acme/sayings").map(lambda batch: tok(batch["line"]), batched=True)
def lines(batch):
    return [f"{batch['line'][0]} ({batch['who'][0]})"]
trainer = SFTTrainer(model=model, train_dataset=rows["train"], peft_config=LoraConfig(r=4), formatting_func=lines,
                     args=TrainingArguments(output_dir="o", max_steps=5))
trainer.train()
