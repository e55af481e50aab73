# expect: converted
# has: save_pretrained_merged
# hasnot: no cell defines
# cause: after training, each save is in a `try:` of its own that prints the error
# %%
from datasets import load_dataset
from transformers import TrainingArguments
from trl import SFTTrainer
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Llama-3.2-1B-Instruct", max_seq_length=2048, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16, target_modules=["q_proj", "k_proj"], lora_alpha=16)
ds = load_dataset("org/tickets", split="train").map(lambda row: {"text": row["body"] + tokenizer.eos_token})
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=ds, dataset_text_field="text", max_seq_length=2048, args=TrainingArguments(output_dir="outputs"))
# %%
trainer.train()
# %%
try:
    model.save_pretrained("adapter")
    tokenizer.save_pretrained("adapter")
    print("saved")
except Exception as e:
    print(f"Error saving the adapter: {str(e)}")
# %%
try:
    model.save_pretrained_merged("merged", tokenizer, save_method="merged_16bit")
except Exception as error:
    print(f"Error merging: {error}")
