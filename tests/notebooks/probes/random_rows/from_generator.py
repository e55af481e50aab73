# expect: converted
# has: from_generator
# cause: Dataset.from_generator over random templates
# %%
import random, string
from datasets import Dataset
TEMPLATES = ["Reverse: {w} -> {r}", "Backwards({w}) = {r}"]
def gen():
    rnd = random.Random(5)
    for _ in range(1000):
        w = "".join(rnd.choices(string.ascii_lowercase, k=rnd.randint(3, 9)))
        yield {"text": rnd.choice(TEMPLATES).format(w=w, r=w[::-1])}
ds = Dataset.from_generator(gen).shuffle(seed=1)
# %%
from trl import SFTConfig, SFTTrainer
SFTTrainer("EleutherAI/pythia-70m", train_dataset=ds, args=SFTConfig(output_dir="rev", dataset_text_field="text")).train()
