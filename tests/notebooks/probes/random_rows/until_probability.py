# expect: converted
# has: random.random() < 0.2
# cause: a loop that ends by chance, with a break
# %%
import random
from datasets import Dataset
random.seed(11)
def walk():
    steps = ["start"]
    while True:
        steps.append(random.choice(["left", "right", "up"]))
        if random.random() < 0.2:
            break
    return " ".join(steps) + " stop"
ds = Dataset.from_dict({"text": [walk() for _ in range(400)]})
# %%
from trl import SFTConfig, SFTTrainer
SFTTrainer("EleutherAI/pythia-70m", train_dataset=ds, args=SFTConfig(output_dir="walk", dataset_text_field="text", max_steps=20)).train()
