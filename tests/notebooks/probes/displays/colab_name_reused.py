# expect: converted
# hasnot: google.colab
# cause: the name of a Colab import is a variable in a function
# %%
from google.colab import output
output.enable_custom_widget_manager()
# %%
import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
def as_text(row):
    output = f"### Question: {row['question']}"
    return {"text": output}
ds = load_dataset("gsm8k", "main", split="train").map(as_text)
rank = 8 if torch.cuda.mem_get_info()[0] < 2e10 else 32
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=rank), args=SFTConfig(output_dir="o")).train()
