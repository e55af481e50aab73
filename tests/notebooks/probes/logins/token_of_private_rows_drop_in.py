# expect: converted
# hasnot: login(
# hasnot: load_dotenv
# says: HUB_TOKEN
# cause: the same: the model is loaded in a function that is called in a loop
# %%
import os
from dotenv import load_dotenv
from huggingface_hub import login
load_dotenv(".env")
hub_token = os.environ.get("HUB_TOKEN")
login(token=hub_token, add_to_git_credential=False)
# %%
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

def run(rate):
    model = AutoModelForCausalLM.from_pretrained("acme/base", token=hub_token)
    tokenizer = AutoTokenizer.from_pretrained("acme/base", token=hub_token)
    rows = load_dataset("acme/private", split="train", token=hub_token).map(lambda row: {"text": row["note"]})
    if rate > 1:
        return None
    trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=rows, peft_config=LoraConfig(r=8), args=SFTConfig("o", learning_rate=rate))
    trainer.train()
    return trainer

trainer = run(1e-4)
