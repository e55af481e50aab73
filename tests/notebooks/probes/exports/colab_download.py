# expect: converted
# hasnot: google.colab
# cause: an export that imports google.colab would fail outside Colab after the training
# fast
# %%
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/tinyllama", load_in_4bit=True, max_seq_length=2048)
model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16)
from datasets import load_dataset
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"] + tokenizer.eos_token})
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=ds, args=SFTConfig(dataset_text_field="text", max_steps=5, output_dir="o"))
trainer.train()
# %%
from google.colab import files
import shutil, glob
model.save_pretrained_gguf("gguf", tokenizer, quantization_method="q4_k_m")
for f in glob.glob("gguf/*.gguf"):
    files.download(f)
