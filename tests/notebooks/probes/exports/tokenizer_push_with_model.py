# expect: converted
# cause: model and tokenizer are pushed together; none may be kept without the other
# hasnot: push_to_hub
# says: hf upload
# %%
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Qwen2.5-7B", load_in_4bit=True, max_seq_length=2048)
model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16)
from datasets import load_dataset
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"] + tokenizer.eos_token})
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=ds, args=SFTConfig(dataset_text_field="text", max_steps=5, output_dir="o"))
trainer.train()
# %%
HUB = "jdoe42/qwen-tickets"
model.push_to_hub(HUB)
tokenizer.push_to_hub(HUB)
