# expect: converted
# has: FastModel.get_peft_model(
# has: rows = Dataset.from_list(
# cause: rows of text, and what the refusal of a class for images advises
# %%
from unsloth import FastModel
from datasets import Dataset, load_dataset
from trl import SFTConfig, SFTTrainer
# %%
model, tokenizer = FastModel.from_pretrained("unsloth/Qwen3.5-4B", load_in_4bit=False)
model = FastModel.get_peft_model(model, finetune_vision_layers=False, r=8, lora_alpha=8)
rows = load_dataset("json", data_files="birds.jsonl", split="train")

def turn(role, words):
    return {"role": role, "content": [{"type": "text", "text": words}]}

rows = Dataset.from_list([{"messages": [turn("user", row["question"]), turn("assistant", row["answer"])]} for row in rows])
# %%
trainer = SFTTrainer(
    model=model,
    tokenizer=tokenizer,
    train_dataset=rows,
    args=SFTConfig(output_dir="out", max_steps=20, per_device_train_batch_size=2, learning_rate=1e-4, max_length=512),
)
trainer.train()
