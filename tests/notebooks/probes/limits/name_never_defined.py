# expect: refused R4
# says: max_seq_length
# cause: the notebook uses a name that no cell defines
# %%
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/gemma-2b", load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16)
from datasets import load_dataset
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
from trl import SFTTrainer
SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=ds, dataset_text_field="text", max_seq_length=max_seq_length).train()
