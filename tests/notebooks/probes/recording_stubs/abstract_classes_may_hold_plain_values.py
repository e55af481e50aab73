# expect: converted
# cause: a plain value may be an instance of an abstract class: a number of numbers.Number, a text of collections.abc.Sequence
# %%
import numbers
from collections.abc import Mapping
import datasets
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
def number(value):
    return value if isinstance(value, numbers.Number) else 1e-3
given = {"rate": 2e-4}
def of(table, name):
    if isinstance(table, Mapping):
        return table[name]
    return getattr(table, name)
ds = datasets.load_dataset("acme/t", split="train").map(lambda r: {"text": r["q"]})
# %%
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", max_steps=5, learning_rate=number(of(given, "rate"))))
trainer.train()
