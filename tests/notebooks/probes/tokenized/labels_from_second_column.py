# expect: converted
# cause: inputs and targets are encoded apart, and a function for map is given to the trainer again
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
tok = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-Coder-0.5B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-Coder-0.5B")
def shape(rows):
    return {"asked": [q + " SQL:" for q in rows["question"]], "wanted": [f"`{s}`" for s in rows["sql"]]}
def encode(rows):
    x = tok(rows["asked"], padding="max_length", truncation=True, max_length=128)
    y = tok(rows["wanted"], padding="max_length", truncation=True, max_length=128)
    return {"input_ids": x["input_ids"], "labels": y["input_ids"]}
d = load_dataset("acme/sql", split="train").map(shape, batched=True).map(encode, batched=True)
SFTTrainer(model=model, train_dataset=d, formatting_func=shape, args=SFTConfig(output_dir="sql")).train()
