# expect: refused R3
# cause: no vision class is named: a processor and images make it a vision training
# %%
from transformers import AutoModel, AutoProcessor
from PIL import Image
proc = AutoProcessor.from_pretrained("HuggingFaceTB/SmolVLM-256M-Instruct")
model = AutoModel.from_pretrained("HuggingFaceTB/SmolVLM-256M-Instruct", trust_remote_code=True)
from datasets import load_dataset
ds = load_dataset("acme/receipts", split="train")
def col(rows):
    b = proc(text=[r["q"] for r in rows], images=[[Image.open(r["path"]).convert("RGB")] for r in rows], return_tensors="pt")
    b["labels"] = b["input_ids"]
    return b
from trl import SFTConfig, SFTTrainer
SFTTrainer(model=model, train_dataset=ds, data_collator=col, args=SFTConfig(output_dir="o")).train()
