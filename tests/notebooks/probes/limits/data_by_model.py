# expect: refused R4
# cause: a pipeline writes the summaries that are trained
# %%
from transformers import pipeline
from datasets import load_dataset
teacher = pipeline("summarization", model="facebook/bart-large-cnn", device=0)
docs = load_dataset("acme/docs", split="train[:100]")
docs = docs.map(lambda r: {"text": r["doc"] + "\nSummary: " + teacher(r["doc"])[0]["summary_text"]})
from trl import SFTConfig, SFTTrainer
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=docs, args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
