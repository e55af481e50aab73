# expect: converted
# has: FastLanguageModel.from_pretrained("lora_model"
# hasnot: get_peft_model
# cause: the training goes on from an older adapter, which Unsloth loads by its folder
# %%
from unsloth import FastLanguageModel
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
# %%
model, tokenizer = FastLanguageModel.from_pretrained("lora_model", max_seq_length=512, load_in_4bit=True)
rows = load_dataset("acme/birds", split="train").map(lambda row: {"text": row["song"]})
# %%
args = SFTConfig(output_dir="out", max_steps=20, learning_rate=1e-4)
trainer = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
trainer.train()
model.save_pretrained("lora_model_2")
