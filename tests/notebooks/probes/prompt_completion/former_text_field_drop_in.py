# expect: converted
# has: dataset_text_field="text"
# cause: the text field as the trainer's own argument, as in TRL before 0.13: this column and no other, beside messages
# fast
# %%
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from trl import SFTTrainer
first = AutoTokenizer.from_pretrained("microsoft/Phi-3-mini-4k-instruct")
def to_messages(row):
    return {"messages": [{"role": "user", "content": row["q"]}, {"role": "assistant", "content": row["a"]}]}
def to_text(row):
    return {"text": "<start>" + first.apply_chat_template(row["messages"], tokenize=False)}
ds = load_dataset("acme/code", split="train").map(to_messages).map(to_text)
# %%
tokenizer = AutoTokenizer.from_pretrained("microsoft/Phi-3-mini-4k-instruct", use_fast=True)
tokenizer.pad_token = tokenizer.unk_token
tokenizer.pad_token_id = tokenizer.convert_tokens_to_ids(tokenizer.pad_token)
def main():
    model = AutoModelForCausalLM.from_pretrained("microsoft/Phi-3-mini-4k-instruct")
    args = TrainingArguments(output_dir="o", max_steps=5, num_train_epochs=(lambda: 1)())
    trainer = SFTTrainer(model=model, train_dataset=ds, peft_config=LoraConfig(r=8), dataset_text_field="text", max_seq_length=512, tokenizer=tokenizer, args=args)
    trainer.train()
if len(ds) > 3:
    main()
