# expect: converted
# says: git clone
# says: run it first
# says: paths are relative to corpus
# cause: the data comes from a cloned repository
# %%
!git clone https://github.com/acme/corpus.git
%cd corpus
# %%
import glob
from datasets import Dataset
texts = [open(p).read() for p in glob.glob("corpus/**/*.txt", recursive=True)]
ds = Dataset.from_dict({"text": texts})
from trl import SFTConfig, SFTTrainer
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
