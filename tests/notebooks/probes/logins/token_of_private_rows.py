# expect: converted
# has: load_dataset("acme/private", split="train", token=hub_token)
# hasnot: login(
# hasnot: load_dotenv
# says: HUB_TOKEN
# cause: a login with a variable that the rows need too; the variable comes from a file .env
# %%
import os
from dotenv import load_dotenv
from huggingface_hub import login
load_dotenv()
hub_token = os.getenv("HUB_TOKEN")
if hub_token is None:
    raise EnvironmentError("HUB_TOKEN is not set")
login(hub_token)
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
rows = load_dataset("acme/private", split="train", token=hub_token).map(lambda row: {"text": row["note"]})
trainer = SFTTrainer("meta-llama/Llama-3.2-1B", train_dataset=rows, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
