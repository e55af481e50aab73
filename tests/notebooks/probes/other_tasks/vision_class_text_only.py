# expect: refused R3
# says: FastModel
# says: no skip_prepare_dataset, and Dataset.from_list(rows)
# says: of which the rows have none
# cause: rows of text and a class for images
# %%
from unsloth import FastVisionModel
from unsloth.trainer import UnslothVisionDataCollator
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
# %%
model, tokenizer = FastVisionModel.from_pretrained("unsloth/Qwen3.5-4B", load_in_4bit=False)
model = FastVisionModel.get_peft_model(model, finetune_vision_layers=False, r=8, lora_alpha=8)
rows = load_dataset("json", data_files="birds.jsonl", split="train")

def turn(role, words):
    return {"role": role, "content": [{"type": "text", "text": words}]}

rows = [{"messages": [turn("user", row["question"]), turn("assistant", row["answer"])]} for row in rows]
# %%
trainer = SFTTrainer(
    model=model,
    tokenizer=tokenizer,
    data_collator=UnslothVisionDataCollator(model, tokenizer),
    train_dataset=rows,
    args=SFTConfig(output_dir="out", max_steps=20, per_device_train_batch_size=2, learning_rate=1e-4, max_length=512,
                   remove_unused_columns=False, dataset_text_field="", dataset_kwargs={"skip_prepare_dataset": True}),
)
trainer.train()
