# expect: refused R2
# cause: a function trains once per seed
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
def fit(rows, seed):
    tr = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=rows, peft_config=LoraConfig(), args=SFTConfig(output_dir=f"fit{seed}", dataset_text_field="text", seed=seed))
    tr.train()
def experiment(name):
    rows = load_dataset(name, split="train").map(lambda r: {"text": r["q"] + r["a"]})
    for seed in (0, 1):
        fit(rows, seed)
experiment("acme/t")
