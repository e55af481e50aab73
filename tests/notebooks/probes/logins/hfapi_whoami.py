# expect: converted
# hasnot: whoami
# cause: a check of the login by HfApi().whoami()
# fast
# %%
from huggingface_hub import HfApi, whoami
api = HfApi()
me = api.whoami()["name"]
print("logged in as", me)
assert whoami(), "please log in"
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
