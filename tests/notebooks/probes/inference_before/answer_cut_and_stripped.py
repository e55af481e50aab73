# expect: converted
# hasnot: partition
# cause: an answer before the training is cut with methods of str, and the base model is given to get_peft_model by keyword under another name
# %%
import re
from unsloth import FastLanguageModel
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/gemma-2-2b-it", max_seq_length=1024, load_in_4bit=True)
model = model.eval()
enc = tokenizer("Q: What is anemia?\nA:", return_tensors="pt").to("cuda")
answer = tokenizer.decode(model.generate(**enc, max_new_tokens=64)[0])
print(answer.partition("A:")[2].lstrip().rstrip(".").casefold())
before = re.sub(r"\s+", " ", answer).partition("A:")[2].strip()
print(before.center(80, "-"))
# %%
adapted = FastLanguageModel.get_peft_model(model=model, r=8, lora_alpha=16)
ds = load_dataset("acme/med", split="train").map(lambda r: {"text": r["q"] + r["a"] + tokenizer.eos_token})
trainer = SFTTrainer(model=adapted, tokenizer=tokenizer, train_dataset=ds, args=SFTConfig(output_dir="o", dataset_text_field="text", max_steps=9))
trainer.train()
