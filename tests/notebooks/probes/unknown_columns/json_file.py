# expect: converted
# cause: a local JSON file, columns unknown
# %%
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Phi-3.5-mini-instruct", load_in_4bit=True, max_seq_length=2048)
model = FastLanguageModel.get_peft_model(model, r=8, lora_alpha=8, target_modules=["q_proj","v_proj"])
from datasets import load_dataset
dataset = load_dataset("json", data_files={"train": "data/train.json"})["train"].shuffle(seed=42)
from trl import SFTTrainer, SFTConfig
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=dataset, args=SFTConfig(
    per_device_train_batch_size=1, gradient_accumulation_steps=16, num_train_epochs=2, learning_rate=1e-4, output_dir="phi"))
trainer.train()
