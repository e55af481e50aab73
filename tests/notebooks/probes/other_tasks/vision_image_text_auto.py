# expect: refused R3
# cause: a model loaded by a helper with AutoModelForImageTextToText
# %%
from transformers import AutoProcessor, AutoModelForImageTextToText, BitsAndBytesConfig
def load(mid):
    return AutoModelForImageTextToText.from_pretrained(mid, quantization_config=BitsAndBytesConfig(load_in_4bit=True)), AutoProcessor.from_pretrained(mid)
model, processor = load("google/gemma-3-4b-it")
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
ds = load_dataset("philschmid/amazon-product-descriptions-vlm", split="train")
def fmt(s):
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": s["Product Name"]}, {"type": "image", "image": s["image"]}]}, {"role": "assistant", "content": [{"type": "text", "text": s["description"]}]}]}
ds = [fmt(s) for s in ds]
SFTTrainer(model=model, train_dataset=ds, processing_class=processor, args=SFTConfig(output_dir="o")).train()
