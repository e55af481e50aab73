# expect: converted
# hasnot: push_to_hub
# says: hf upload
# hasnot: google.colab
# hasnot: login(
# cause: the account for publishing comes from Colab's secrets, after the training
# fast
# %%
from unsloth import FastLanguageModel
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/gemma-2-2b-it", max_seq_length=1024, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16)
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=ds, args=SFTConfig(output_dir="o", dataset_text_field="text", max_steps=9))
trainer.train()
# %%
from huggingface_hub import login
from google.colab import userdata
key = userdata.get("HUGGINGFACEHUB_API_TOKEN")
login(token=key)
model.push_to_hub("anna/coder", token=key)
tokenizer.push_to_hub("anna/coder", token=key)
