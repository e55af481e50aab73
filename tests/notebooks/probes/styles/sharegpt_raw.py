# expect: converted
# cause: ShareGPT rows straight from a file, with standardize_sharegpt
# %%
from unsloth import FastLanguageModel
from unsloth.chat_templates import get_chat_template, standardize_sharegpt, train_on_responses_only
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Qwen2.5-7B-Instruct", max_seq_length=4096, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16, use_rslora=True)
from datasets import load_dataset
ds = standardize_sharegpt(load_dataset("json", data_files="chats.json", split="train"))
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=ds, args=SFTConfig(output_dir="o", max_steps=30))
trainer.train()
