# expect: converted
# kept or named: unwrapped_old_generate
# cause: an attribute of the model that an older Unsloth left behind is deleted before the training
# %%
from unsloth import FastLanguageModel
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/gemma-2-2b-it", max_seq_length=1024, load_in_4bit=True)
lora = FastLanguageModel.get_peft_model(model=model, r=16, lora_alpha=16)
ds = load_dataset("acme/med", split="train").map(lambda r: {"text": r["q"] + r["a"] + tokenizer.eos_token})
if hasattr(model, "unwrapped_old_generate"):
    del model.unwrapped_old_generate
trainer = SFTTrainer(model=lora, tokenizer=tokenizer, train_dataset=ds, args=SFTConfig(output_dir="o", dataset_text_field="text", max_steps=9))
trainer.train()
