# expect: refused R4
# cause: answers of a service become the rows
# %%
from openai import OpenAI
client = OpenAI()
topics = ["tax", "law", "rent"]
rows = []
for t in topics:
    r = client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": f"Write a Q&A on {t}"}])
    rows.append({"text": r.choices[0].message.content})
from datasets import Dataset
ds = Dataset.from_list(rows)
from trl import SFTConfig, SFTTrainer
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
