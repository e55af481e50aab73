# expect: converted
# hasnot: accuracy_score
# cause: a metric of the base model with a table of labels, before the training
# %%
import numpy as np
import pandas as pd
from sklearn.metrics import accuracy_score, classification_report
from datasets import Dataset
df = pd.read_csv("reviews.csv")
train, test = df.sample(frac=0.9, random_state=1), df.drop(df.sample(frac=0.9, random_state=1).index)
rows = Dataset.from_pandas(pd.DataFrame({"text": train.apply(lambda r: f"{r['body']} = {r['label']}", axis=1)}))
y_true = list(test["label"])
def score(truth, guess):
    table = {"bad": 0, "fine": 1, "good": 2}
    t = np.vectorize(lambda k: table.get(k, 1))(truth)
    g = np.vectorize(lambda k: table.get(k, 1))(guess)
    print(accuracy_score(t, g), classification_report(t, g))
    for name in set(truth):
        print(name, table[name], (t == table[name]).mean())
score(y_true, ["fine"] * len(y_true))
# %%
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
SFTTrainer("google/gemma-2b", train_dataset=rows, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
