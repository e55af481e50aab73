# expect: converted
# hasnot: UserSecretsClient
# cause: a secret of Kaggle in a variable, copied into the environment
# %%
from kaggle_secrets import UserSecretsClient
import os
secrets = UserSecretsClient()
value = secrets.get_secret("HUB_TOKEN")
os.environ["HF_TOKEN"] = value
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
def run(rate):
    model = AutoModelForCausalLM.from_pretrained("google/gemma-2-2b", token=value)
    tok = AutoTokenizer.from_pretrained("google/gemma-2-2b", token=value)
    rows = load_dataset("acme/notes", split="train").map(lambda r: {"text": r["note"]})
    if rate > 1:
        return None
    t = SFTTrainer(model=model, train_dataset=rows, peft_config=LoraConfig(r=8), processing_class=tok, args=SFTConfig("o", learning_rate=rate))
    t.train()
    return t
t = run(1e-4)
