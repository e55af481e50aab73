# expect: converted
# cause: train() inside try/except KeyboardInterrupt, saved in finally
# %%
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/gemma-2b", load_in_4bit=True, max_seq_length=1024)
model = FastLanguageModel.get_peft_model(model, r=16)
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=ds, args=SFTConfig(dataset_text_field="text", output_dir="x", max_steps=9))
try:
    trainer.train()
except KeyboardInterrupt:
    print("stopped by hand")
finally:
    model.save_pretrained("x/last")
