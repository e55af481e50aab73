# expect: converted
# has: os.walk
# cause: Kaggle: csv of a competition, train/validation by sklearn, prompts by apply
# %%
import os, warnings, numpy as np, pandas as pd
warnings.filterwarnings("ignore")
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
for dirname, _, filenames in os.walk("/kaggle/input"):
    for filename in filenames:
        print(os.path.join(dirname, filename))
# %%
from sklearn.model_selection import train_test_split
from datasets import Dataset
df = pd.read_csv("/kaggle/input/sentiment-analysis-for-financial-news/all-data.csv", names=["sentiment", "text"], encoding="utf-8", encoding_errors="replace")
X_train, X_test = [], []
for s in ["positive", "neutral", "negative"]:
    tr, te = train_test_split(df[df.sentiment == s], train_size=300, test_size=300, random_state=42)
    X_train.append(tr); X_test.append(te)
X_train = pd.concat(X_train).sample(frac=1, random_state=10)
def generate_prompt(r):
    return f"Analyze the sentiment. [{r['text']}] = {r['sentiment']}".strip()
X_train = pd.DataFrame(X_train.apply(generate_prompt, axis=1), columns=["text"])
train_data = Dataset.from_pandas(X_train)
# %%
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainingArguments
from peft import LoraConfig
from trl import SFTTrainer
name = "/kaggle/input/llama-2/pytorch/7b-hf/1"
model = AutoModelForCausalLM.from_pretrained(name, device_map="auto", quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=getattr(torch, "float16")))
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True); tokenizer.pad_token = tokenizer.eos_token
trainer = SFTTrainer(model=model, train_dataset=train_data, peft_config=LoraConfig(lora_alpha=16, lora_dropout=0.1, r=64, bias="none", task_type="CAUSAL_LM"), dataset_text_field="text", tokenizer=tokenizer, max_seq_length=1024,
    args=TrainingArguments(output_dir="logs", num_train_epochs=3, per_device_train_batch_size=1, gradient_accumulation_steps=8, optim="paged_adamw_32bit", save_steps=0, logging_steps=25, learning_rate=2e-4, fp16=True))
trainer.train()
trainer.model.save_pretrained("trained-model")
