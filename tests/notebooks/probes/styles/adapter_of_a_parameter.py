# expect: converted
# has: peft_config=
# cause: a function is given a model that has its adapter, and its LoRA configuration for the trainer
# %%
import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
# %%
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
ds = load_dataset("org/tickets", split="train")
def train_model(net, rows, lora):
    trainer = SFTTrainer(
        model=net, processing_class=tokenizer, train_dataset=rows, args=SFTConfig(output_dir="o"), peft_config=lora,
    )
    trainer.train()
# %%
lora = LoraConfig(r=8 if torch.cuda.mem_get_info()[0] < 2e10 else 32)
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
model = get_peft_model(model, lora)
train_model(model, rows=ds, lora=lora)
