# expect: refused R1|R4
# cause: an encoder-decoder model with SFTTrainer: not a causal model
# %%
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from trl import SFTTrainer, SFTConfig
from datasets import load_dataset
m = AutoModelForSeq2SeqLM.from_pretrained("google/flan-t5-base"); t = AutoTokenizer.from_pretrained("google/flan-t5-base")
SFTTrainer(model=m, processing_class=t, train_dataset=load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]}), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
