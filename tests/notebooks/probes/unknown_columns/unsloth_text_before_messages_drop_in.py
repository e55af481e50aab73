# expect: converted
# has: train_dataset=ds
# cause: Unsloth reads the text before messages, TRL messages first: the script's trainer does as Unsloth
# %%
import torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from unsloth import FastLanguageModel
rank = 8 if torch.cuda.mem_get_info()[0] < 2e10 else 32
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/gpt-oss-20b", max_seq_length=1024, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=rank, target_modules=["q_proj", "k_proj"], lora_alpha=16)
# %%
def as_texts(examples):
    return {"text": [tokenizer.apply_chat_template(one, tokenize=False) + tokenizer.eos_token for one in examples["messages"]]}
ds = load_dataset("org/thinking", split="train").map(as_texts, batched=True)
trainer = SFTTrainer(
    model=model, tokenizer=tokenizer, train_dataset=ds, args=SFTConfig(output_dir="o", max_steps=30, dataset_text_field="text"),
)
trainer.train()
