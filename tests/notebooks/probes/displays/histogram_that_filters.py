# expect: converted
# has: lengths
# cause: the lengths also choose the rows: they are not a display
# %%
from transformers import AutoTokenizer
from datasets import load_dataset
tok = AutoTokenizer.from_pretrained("mistralai/Mistral-7B-v0.1")
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
lengths = [len(tok(t)["input_ids"]) for t in ds["text"]]
import matplotlib.pyplot as plt
plt.hist(lengths); plt.show()
keep = [i for i, n in enumerate(lengths) if n < 512]
ds = ds.select(keep)
# %%
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
trainer = SFTTrainer("mistralai/Mistral-7B-v0.1", train_dataset=ds, processing_class=tok, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
