# expect: converted
# cause: save_pretrained_merged with save_method merged_4bit_forced is an export
# has: merged_4bit_forced
# %%
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/mistral-7b-bnb-4bit", max_seq_length=2048, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16)
from datasets import load_dataset
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"] + tokenizer.eos_token})
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=ds, args=SFTConfig(dataset_text_field="text", max_steps=5, output_dir="o"))
trainer.train()
model.save_pretrained_merged("model4", tokenizer, save_method="merged_4bit_forced")
