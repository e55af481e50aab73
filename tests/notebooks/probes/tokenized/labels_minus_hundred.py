# expect: converted
# cause: the notebook makes its own labels while the data also has a text column
# fast
# %%
from datasets import load_dataset
from transformers import AutoTokenizer, AutoModelForCausalLM
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
data = load_dataset("acme/forum", split="train").map(lambda r: {"text": r["title"] + r["post"]})
# %%
def tok(row):
    enc = tokenizer(row["text"], truncation=True, max_length=256)
    enc["labels"] = [-100] * 10 + enc["input_ids"][10:]
    return enc
data = data.map(tok)
# %%
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer(model=model, train_dataset=data, args=SFTConfig(output_dir="forum", dataset_text_field="text"))
trainer.train()
