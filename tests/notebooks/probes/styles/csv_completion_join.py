# expect: converted
# cause: two csv files joined, then prompt/completion by a dict comprehension
# %%
import csv
from datasets import Dataset
def read(path):
    with open(path, newline="", encoding="utf-8") as f:
        return {r["id"]: r for r in csv.DictReader(f)}
questions, answers = read("q.csv"), read("a.csv")
rows = [{"prompt": questions[k]["question"] + "\n", "completion": answers[k]["answer"]} for k in questions if k in answers]
train = Dataset.from_list(rows)
# %%
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=train, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o")).train()
