# expect: refused R4
# says: set it before, in SFTConfig or SFTTrainer
# cause: the trainer has no tokenizer, loads that of the model, and is given the same one later
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig, get_peft_model
from trl import SFTConfig, SFTTrainer
name = "Qwen/Qwen2.5-0.5B"
tok = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
model = get_peft_model(model, LoraConfig(r=8))
def tokens(row):
    found = tok(row["q"], max_length=64, truncation=True)
    return {"input_ids": found["input_ids"], "labels": found["input_ids"].copy()}
ds = load_dataset("acme/t", split="train").map(tokens, remove_columns=["q"])
# %%
import sys
if len(sys.argv) > 5:
    ds = ds.select(range(10))
trainer = SFTTrainer(model, train_dataset=ds, args=SFTConfig(output_dir="o", max_steps=5))
trainer.tokenizer = tok
try:
    trainer.train()
except KeyboardInterrupt:
    print("stopped")
