# expect: converted
# has: train_dataset=ds
# has: formatting_func=as_texts
# cause: Unsloth ignores formatting_func if the rows have the text field
# %%
import torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from unsloth import FastLanguageModel
rank = 8 if torch.cuda.mem_get_info()[0] < 2e10 else 32
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Llama-3.2-1B-Instruct", max_seq_length=2048, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=rank, target_modules=["q_proj", "k_proj"], lora_alpha=16)
# %%
def as_texts(examples):
    return [q + a + tokenizer.eos_token for q, a in zip(examples["question"], examples["answer"])]
ds = load_dataset("org/tickets", split="train")
trainer = SFTTrainer(
    model=model, tokenizer=tokenizer, train_dataset=ds, max_seq_length=2048, formatting_func=as_texts,
    args=SFTConfig(output_dir="o"),
)
trainer.train()
