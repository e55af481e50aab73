# expect: converted
# hasnot: add_column
# hasnot: answers.json
# says: answers.json
# cause: the base model's answers become a column of held-out rows, in a file for a later comparison; without the loop the column is empty and add_column fails
# %%
import copy, torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from trl import SFTConfig, SFTTrainer, setup_chat_format
tok = AutoTokenizer.from_pretrained("facebook/opt-1.3b")
model = AutoModelForCausalLM.from_pretrained("facebook/opt-1.3b", device_map="auto")
model, tok = setup_chat_format(model, tok)
parts = load_dataset("acme/clinic", split="train").train_test_split(0.1, seed=1)
train = parts["train"].map(lambda r: {"messages": [{"role": "user", "content": r["q"]}, {"role": "assistant", "content": r["a"]}]}, remove_columns=["q", "a"])
# %%
held = copy.deepcopy(parts["test"])
pipe = pipeline("text-generation", model=model, tokenizer=tok)
answers = []
for start in range(0, len(held), 8):
    batch = held[start:start + 8]["q"]
    answers.extend(one[0]["generated_text"] for one in pipe(batch, max_new_tokens=64))
# %%
held = held.add_column("before", answers)
held.to_json("results/answers.json", orient="records")
# %%
trainer = SFTTrainer(model=model, processing_class=tok, train_dataset=train, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", max_steps=5))
trainer.train()
