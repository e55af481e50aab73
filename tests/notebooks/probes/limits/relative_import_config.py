# expect: refused R4
# cause: settings come from a module of the repository
# %%
import config as C
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
ds = load_dataset(C.DATASET, split="train")
SFTTrainer(C.MODEL, train_dataset=ds, args=SFTConfig(output_dir=C.OUT, learning_rate=C.LR)).train()
