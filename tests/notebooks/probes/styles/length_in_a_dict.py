# expect: converted
# hasnot: max_length=
# cause: Unsloth's loader gets its length from a dict, and the trainer takes it from the loader
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from unsloth import FastLanguageModel
LOADER = dict(model_name="unsloth/Llama-3.2-3B-Instruct", max_seq_length=4096, load_in_4bit=True)
model, tokenizer = FastLanguageModel.from_pretrained(**LOADER)
rank = 32 if model.config.vocab_size > 100_000 else 16
model = FastLanguageModel.get_peft_model(model, r=rank)
ds = load_dataset("yahma/alpaca-cleaned", split="train").map(lambda row: {"text": row["output"] + tokenizer.eos_token})
SFTTrainer(model=model, processing_class=tokenizer, train_dataset=ds, args=SFTConfig(output_dir="o", max_steps=60)).train()
