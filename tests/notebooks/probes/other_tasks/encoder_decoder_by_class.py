# expect: refused R1
# says: encoder-decoder
# cause: an encoder-decoder model by the name of its own class is not a model that reads images
# %%
from datasets import load_dataset
from transformers import AutoTokenizer, MBartForConditionalGeneration
from trl import SFTConfig, SFTTrainer
model = MBartForConditionalGeneration.from_pretrained("facebook/mbart-large-cc25")
tokenizer = AutoTokenizer.from_pretrained("facebook/mbart-large-cc25")
ds = load_dataset("acme/t", split="train")
SFTTrainer(model=model, processing_class=tokenizer, train_dataset=ds, args=SFTConfig(output_dir="o")).train()
