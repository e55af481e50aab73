# expect: converted
# hasnot: userdata
# cause: `raise` when a token is missing, Colab secrets with a fallback
# %%
import os
try:
    from google.colab import userdata
    HF_TOKEN = userdata.get("HF_TOKEN")
except ImportError:
    HF_TOKEN = os.environ.get("HF_TOKEN")
if not HF_TOKEN:
    raise ValueError("Set HF_TOKEN first!")
os.environ["HF_TOKEN"] = HF_TOKEN
# %%
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("google/gemma-2-2b", token=HF_TOKEN)
tokenizer = AutoTokenizer.from_pretrained("google/gemma-2-2b", token=HF_TOKEN)
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer(model, train_dataset=ds, processing_class=tokenizer, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
