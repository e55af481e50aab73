# expect: refused R3
# cause: rows with images in a list, looked at by index before the model is loaded
# %%
from datasets import load_dataset
train, test = load_dataset("HuggingFaceM4/ChartQA", split=["train[:10%]", "test[:10%]"])
def fmt(s):
    return {"images": [s["image"]], "messages": [{"role": "user", "content": [{"type": "image", "image": s["image"]}, {"type": "text", "text": s["query"]}]}, {"role": "assistant", "content": [{"type": "text", "text": s["label"][0]}]}]}
train = [fmt(s) for s in train]
train[200]
# %%
from transformers import Idefics3ForConditionalGeneration, AutoProcessor
model = Idefics3ForConditionalGeneration.from_pretrained("HuggingFaceTB/SmolVLM-Instruct")
processor = AutoProcessor.from_pretrained("HuggingFaceTB/SmolVLM-Instruct")
from trl import SFTConfig, SFTTrainer
SFTTrainer(model=model, train_dataset=train, processing_class=processor, args=SFTConfig(output_dir="o")).train()
