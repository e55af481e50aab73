# expect: converted
# hasnot: google.colab
# cause: the notebook stops if a secret of Colab is missing
# %%
from google.colab import userdata
token = userdata.get("HF_TOKEN")
if not token:
    raise RuntimeError("add HF_TOKEN to the secrets")
key = userdata.get("WANDB_API_KEY")
assert key is not None, "no key"
# %%
from unsloth import FastLanguageModel
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/gemma-2-2b-it", max_seq_length=1024, load_in_4bit=True, token=token)
model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16)
ds = load_dataset("acme/private", split="train", token=token).map(lambda r: {"text": r["a"]})
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=ds, args=SFTConfig(output_dir="o", dataset_text_field="text", max_steps=9))
trainer.train()
