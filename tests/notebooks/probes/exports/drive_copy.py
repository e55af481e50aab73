# expect: converted
# hasnot: google.colab
# hasnot: /content/drive
# cause: saving to Drive after the training; the result is saved below the working directory
# %%
from google.colab import drive
drive.mount('/content/drive')
# %%
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/gemma-2-9b", load_in_4bit=True, max_seq_length=1024)
model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16)
from datasets import load_dataset
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"] + tokenizer.eos_token})
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=ds, args=SFTConfig(dataset_text_field="text", max_steps=5, output_dir="o"))
trainer.train()
save_dir = "/content/drive/MyDrive/gemma-run"
model.save_pretrained(save_dir); tokenizer.save_pretrained(save_dir)
