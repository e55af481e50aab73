# expect: converted
# has: add("What is open?", "Nothing.")
# has: add_all(
# cause: functions fill a list and a dict of the notebook
# %%
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
# %%
rows, index = [], {}
def add(question, answer):
    rows.append({"text": f"Q: {question}\nA: {answer}"})
def register(question, answer):
    index[question] = answer
def add_all(pairs):
    for question, answer in pairs:
        register(question, answer)
add("What is open?", "Nothing.")
add("What is closed?", "All.")
add_all([("Who?", "You."), ("When?", "Now.")])
for question, answer in index.items():
    add(question, answer)
rank = 8
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=Dataset.from_list(rows), peft_config=LoraConfig(r=rank), args=SFTConfig(output_dir="o")).train()
