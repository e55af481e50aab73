# expect: converted
# hasnot: login(
# cause: a token as a literal in login, in a comment and in a shell line
# fast
# %%
!huggingface-cli login --token @HF@
# my token: @HF@
from huggingface_hub import login
login(token="@HF@", add_to_git_credential=True)
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train", token="@HF@").map(lambda r: {"text": r["a"]})
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
