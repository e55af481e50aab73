# expect: refused R3
# cause: images with an AutoProcessor and a class by getattr
# %%
import transformers
cls = getattr(transformers, "LlavaForConditionalGeneration")
processor = transformers.AutoProcessor.from_pretrained("llava-hf/llava-1.5-7b-hf")
model = cls.from_pretrained("llava-hf/llava-1.5-7b-hf")
def collate(examples):
    texts = [processor.apply_chat_template(e["messages"], tokenize=False) for e in examples]
    images = [e["images"][0] for e in examples]
    batch = processor(images=images, text=texts, return_tensors="pt", padding=True)
    batch["labels"] = batch["input_ids"].clone()
    return batch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
ds = load_dataset("HuggingFaceH4/llava-instruct-mix-vsft", split="train")
SFTTrainer(model=model, train_dataset=ds, data_collator=collate, args=SFTConfig(output_dir="o", remove_unused_columns=False, dataset_kwargs={"skip_prepare_dataset": True})).train()
