# expect: converted
# has: requests
# cause: rows from web pages are read by the notebook's own code, once per machine
# %%
import requests
from bs4 import BeautifulSoup
urls = ["https://example.com/a", "https://example.com/b"]
rows = []
for u in urls:
    soup = BeautifulSoup(requests.get(u, timeout=10).text, "html.parser")
    rows.append({"text": soup.get_text()})
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=Dataset.from_list(rows), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
