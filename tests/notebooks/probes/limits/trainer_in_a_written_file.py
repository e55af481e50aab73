# expect: refused R0
# says: finetune convert train.py
# cause: a cell writes the script that trains, and a shell line starts it
# %%
!pip install trl
# %%
%%writefile train.py
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
def main():
    ds = load_dataset("org/tickets", split="train")
    SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o")).train()
main()
# %%
!accelerate launch --num_processes 2 train.py
