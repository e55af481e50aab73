# expect: converted
# has: return {"text": f"{row['q']}\n{row['a']}"}
# cause: a docstring of several lines in a function given to map
# fast
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
def make_text(row):
    """
    Build the training text.

    Args:
        row: one row of the data set

    Returns:
        dict with the key ``text``
    """
    return {"text": f"{row['q']}\n{row['a']}"}
ds = load_dataset("acme/qa", split="train").map(make_text)
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
