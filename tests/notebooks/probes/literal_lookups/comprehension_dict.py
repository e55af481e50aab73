# expect: converted
# has: LABELS
# cause: a comprehension at the top level looks up a literal dict with keys of unknown rows
# fast
# %%
from datasets import load_dataset, Dataset
LABELS = {0: "negative", 1: "neutral", 2: "positive"}
raw = load_dataset("acme/sentiment", split="train")
rows = [{"text": f"Review: {r['review']}\nSentiment: {LABELS[r['label']]}"} for r in raw]
ds = Dataset.from_list(rows)
# %%
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
