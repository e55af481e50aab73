# expect: converted
# says: imports mylab
# cause: the loader is in a package that is not there: the trainer takes the length of the rows from the model
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from unsloth import FastLanguageModel
from mylab import loading
model, tokenizer = loading.load_model("unsloth/mistral-7b-instruct-v0.3-bnb-4bit")
model = FastLanguageModel.get_peft_model(model, r=16)
ds = load_dataset("yahma/alpaca-cleaned", split="train").map(lambda row: {"text": row["output"] + tokenizer.eos_token})
SFTTrainer(model=model, processing_class=tokenizer, train_dataset=ds, args=SFTConfig(output_dir="o", max_steps=60, dataset_text_field="text")).train()
