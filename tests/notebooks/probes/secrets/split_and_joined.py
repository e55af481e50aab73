# expect: converted
# cause: a token in two parts, joined at run time
# %%
part_a, part_b = "@HF@"[:12], "rest"
hf_token = "".join(["@HF@"])
import os
os.environ.update({"HUGGING_FACE_HUB_TOKEN": hf_token, "WANDB_API_KEY": "@WANDB@"})
# %%
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("google/gemma-2b", token=hf_token)
tok = AutoTokenizer.from_pretrained("google/gemma-2b", token=hf_token)
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
SFTTrainer(model, processing_class=tok, train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
