# expect: converted
# hasnot: load_dotenv
# cause: dotenv, `!huggingface-cli login` with a variable, and notebook_login
# %%
from dotenv import load_dotenv
import os
load_dotenv()
hf = os.environ["HF_TOKEN"]
!huggingface-cli login --token $hf
# %%
from huggingface_hub import notebook_login
notebook_login()
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer("meta-llama/Llama-3.2-1B", train_dataset=ds, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
