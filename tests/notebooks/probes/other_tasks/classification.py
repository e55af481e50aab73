# expect: refused R1|R4
# cause: sequence classification
# %%
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments
from datasets import load_dataset
m = AutoModelForSequenceClassification.from_pretrained("roberta-base", num_labels=3)
Trainer(model=m, args=TrainingArguments("o"), train_dataset=load_dataset("acme/t", split="train")).train()
