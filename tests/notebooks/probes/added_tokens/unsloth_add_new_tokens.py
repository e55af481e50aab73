# expect: converted
# has: add_new_tokens
# cause: Unsloth's add_new_tokens before the adapter
# %%
from unsloth import FastLanguageModel, add_new_tokens
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Llama-3.2-1B", max_seq_length=1024, load_in_4bit=True)
add_new_tokens(model, tokenizer, new_tokens=["<thought>", "</thought>"])
model = FastLanguageModel.get_peft_model(model, r=16, target_modules=["q_proj", "v_proj", "embed_tokens", "lm_head"])
from datasets import load_dataset
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
from trl import SFTTrainer, SFTConfig
SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=ds, args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
