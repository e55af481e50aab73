# expect: converted
# has: resize_token_embeddings
# cause: additional special tokens, resize_token_embeddings and modules_to_save
# %%
from transformers import AutoModelForCausalLM, AutoTokenizer
checkpoint = "Qwen/Qwen2.5-1.5B"
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>", "</tool>"]})
model = AutoModelForCausalLM.from_pretrained(checkpoint)
model.resize_token_embeddings(len(tokenizer))
# %%
from datasets import load_dataset
ds = load_dataset("acme/tools", split="train").map(lambda r: {"text": f"<tool>{r['call']}</tool>{r['result']}"})
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
cfg = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], modules_to_save=["embed_tokens", "lm_head"])
trainer = SFTTrainer(model=model, train_dataset=ds, peft_config=cfg, processing_class=tokenizer, args=SFTConfig(output_dir="tools", dataset_text_field="text"))
trainer.train()
