# expect: converted
# has: max_length=longest
# cause: rows tokenized with the model's own maximum: SFTTrainer judges the real ones
# %%
from unsloth import FastLanguageModel
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
# %%
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Qwen2.5-0.5B", max_seq_length=512, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=8, target_modules=["q_proj", "v_proj"], lora_alpha=8)
rows = load_dataset("json", data_files="birds.jsonl", split="train")
longest = model.config.max_position_embeddings
rows = rows.map(lambda row: tokenizer(row["song"], truncation=True, max_length=longest))
# %%
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=rows, args=SFTConfig(
    output_dir="runs", max_steps=20, learning_rate=1e-4, per_device_train_batch_size=2))
trainer.train()
