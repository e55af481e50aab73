# expect: converted
# cause: texts without EOS on the Unsloth backend: TRL appends an EOS and trains it, unsloth_zoo appends none
# fast
# %%
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/mistral-7b-bnb-4bit", max_seq_length=2048, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16)
TEMPLATE = "### Question:\n{}\n### Answer:\n{}"
def texts(rows):
    return {"text": [TEMPLATE.format(q, a) for q, a in zip(rows["question"], rows["answer"])]}
from datasets import load_dataset
data = load_dataset("acme/qa", split="train").map(texts, batched=True)
from transformers import TrainingArguments
from trl import SFTTrainer
SFTTrainer(model=model, train_dataset=data, dataset_text_field="text", max_seq_length=2048, args=TrainingArguments("outputs", max_steps=20)).train()
