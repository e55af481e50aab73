# expect: converted
# cause: tokens in a heading, in %env and in a git URL
# %% [markdown]
# # Setup (token @HF@, wandb @WANDB@)
# %%
%env HF_TOKEN=@HF@
%env WANDB_API_KEY @WANDB@
!git clone https://user:@HF@@huggingface.co/acme/model
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
