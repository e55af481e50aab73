# expect: converted
# cause: a class of settings with keys of services
# %%
class CFG:
    model = "Qwen/Qwen2.5-0.5B"
    hf_key = "@HF@"
    wandb_api = "@WANDB@"
    openai_api_key: str = "@OPENAI@"
    db_password = "@PASSWORD@"
    lr = 3e-5
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
SFTTrainer(CFG.model, train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text", learning_rate=CFG.lr)).train()
