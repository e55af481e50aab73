# expect: converted
# has: get_peft_model
# cause: setup_chat_format between Unsloth's loader and its adapter
# %%
from datasets import load_dataset
from unsloth import FastLanguageModel
from transformers import TrainingArguments
from trl import SFTTrainer, setup_chat_format
LOADER = dict(model_name="danish-foundation-models/munin-7b-alpha", max_seq_length=2048, dtype=None, load_in_4bit=True)
model, tokenizer = FastLanguageModel.from_pretrained(**LOADER)
model, tokenizer = setup_chat_format(model, tokenizer)
model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16, random_state=42)
ds = load_dataset("kobprof/skolegpt-instruct", split="train")
ds = ds.map(lambda row: {"messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["response"]}]})
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=ds, max_seq_length=LOADER["max_seq_length"], packing=True,
    args=TrainingArguments(output_dir="o", learning_rate=2e-4, num_train_epochs=1, lr_scheduler_type="linear"))
trainer.train()
