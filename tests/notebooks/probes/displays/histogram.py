# expect: converted
# hasnot: matplotlib
# cause: a histogram of token lengths before the training
# %%
from transformers import AutoTokenizer
from datasets import load_dataset
tok = AutoTokenizer.from_pretrained("google/gemma-2-2b")
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
# %%
import matplotlib.pyplot as plt
import numpy as np
lengths = [len(tok(x["text"])["input_ids"]) for x in ds]
plt.figure(figsize=(10, 6))
plt.hist(lengths, bins=50, color="steelblue")
plt.axvline(np.percentile(lengths, 95), color="r", linestyle="--")
plt.title("Token lengths")
plt.show()
print(f"max {max(lengths)}, mean {np.mean(lengths):.1f}")
# %%
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
trainer = SFTTrainer("google/gemma-2-2b", train_dataset=ds, processing_class=tok, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
