# expect: converted
# hasnot: legend
# cause: a chart shows the mode, the median and a quantile of the lengths
# %%
import matplotlib.pyplot as plt
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
ds = load_dataset("org/tickets", split="train").map(lambda row: {"text": row["body"]})
lengths = ds.map(lambda row: {"n": len(row["text"])}).to_pandas()
fig, axis = plt.subplots(1, 1, figsize=(12, 6))
axis.hist(lengths["n"], bins=50)
axis.legend(["most: {} median: {}".format(lengths["n"].mode()[0], lengths["n"].median())], loc="upper right")
print(lengths["n"].quantile(0.95), lengths.corr())
plt.show()
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o")).train()
