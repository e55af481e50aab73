# expect: converted
# hasnot: google.colab
# hasnot: nbformat
# cause: a cell that removes the widgets from the notebook's own file, for GitHub
# fast
# %%
import nbformat
from google.colab import _message
_ipynb = _message.blocking_request("get_ipynb")["ipynb"]
if "widgets" in _ipynb["metadata"]:
    del _ipynb["metadata"]["widgets"]
with open("Finetune.ipynb", "w") as f:
    nbformat.write(nbformat.from_dict(_ipynb), f)
print("cleaned")
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
