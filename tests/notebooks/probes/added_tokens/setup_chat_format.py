# expect: converted
# has: setup_chat_format
# cause: TRL's setup_chat_format adds two tokens and resizes the embeddings
# fast
# %%
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import setup_chat_format, SFTConfig, SFTTrainer
from peft import LoraConfig
from datasets import load_dataset
model = AutoModelForCausalLM.from_pretrained("mistralai/Mistral-7B-v0.1", torch_dtype=torch.bfloat16)
tokenizer = AutoTokenizer.from_pretrained("mistralai/Mistral-7B-v0.1")
model, tokenizer = setup_chat_format(model, tokenizer)
dataset = load_dataset("b-mc2/sql-create-context", split="train[:1000]")
def conv(s):
    return {"messages": [{"role": "system", "content": s["context"]}, {"role": "user", "content": s["question"]}, {"role": "assistant", "content": s["answer"]}]}
dataset = dataset.map(conv, remove_columns=dataset.features, batched=False)
peft_config = LoraConfig(lora_alpha=128, lora_dropout=0.05, r=256, bias="none", target_modules="all-linear", task_type="CAUSAL_LM", modules_to_save=["lm_head", "embed_tokens"])
trainer = SFTTrainer(model=model, train_dataset=dataset, peft_config=peft_config, processing_class=tokenizer,
                     args=SFTConfig(output_dir="text-to-sql", max_length=3072, packing=True, learning_rate=2e-4, max_grad_norm=0.3, warmup_ratio=0.03, lr_scheduler_type="constant"))
trainer.train()
