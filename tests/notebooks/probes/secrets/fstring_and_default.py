# expect: converted
# cause: as a default of a parameter, inside an f-string, in os.getenv's default
# %%
import os
def push(repo, token="@HF@"):
    print(f"pushing {repo} with {token}")
KEY = os.getenv("HF_TOKEN", "@HF@")
auth = f"token {'@HF@'}"
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train", token=KEY).map(lambda r: {"text": r["a"]})
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text", hub_token="@HF@"))
trainer.train()
trainer.model.push_to_hub("jdoe42/run", token="@HF@")
