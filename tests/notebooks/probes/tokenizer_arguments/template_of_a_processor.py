# expect: converted
# has: tokenizer.apply_chat_template(examples["conversations"])
# cause: Unsloth loads a processor for Gemma 3, whose apply_chat_template returns text by default; a tokenizer's returns token ids
# %%
from unsloth import FastModel
model, tokenizer = FastModel.from_pretrained("unsloth/gemma-3-4b-it", max_seq_length=2048, load_in_4bit=True)
model = FastModel.get_peft_model(model, finetune_vision_layers=False, r=8, lora_alpha=8, lora_dropout=0, bias="none")
# %%
from datasets import load_dataset
from unsloth.chat_templates import get_chat_template, standardize_data_formats
tokenizer = get_chat_template(tokenizer, chat_template="gemma-3")
dataset = standardize_data_formats(load_dataset("org/tickets", split="train"))
def apply_chat_template(examples):
    texts = tokenizer.apply_chat_template(examples["conversations"])
    return {"text": texts}
dataset = dataset.map(apply_chat_template, batched=True)
# %%
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer(
    model=model, tokenizer=tokenizer, train_dataset=dataset,
    args=SFTConfig(dataset_text_field="text", per_device_train_batch_size=2, max_steps=30, report_to="none"),
)
trainer.train()
