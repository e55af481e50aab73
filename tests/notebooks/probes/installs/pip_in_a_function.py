# expect: converted
# hasnot: pip
# has: attn_implementation
# cause: a function that chooses the dtype installs a package
# %%
import os, subprocess, sys
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
def hardware():
    if torch.cuda.is_bf16_supported():
        os.system("pip install flash_attn --no-build-isolation")
        subprocess.run([sys.executable, "-m", "pip", "install", "ninja"], check=True)
        return torch.bfloat16, "flash_attention_2"
    return torch.float16, "sdpa"
compute_dtype, attention = hardware()
# %%
def load(name, dtype, attention):
    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=dtype, attn_implementation=attention, device_map="auto")
    return model
model = load("Qwen/Qwen2.5-0.5B", compute_dtype, attention)
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["q"] + r["a"]})
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
class Fit:
    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = model, tokenizer
    def run(self, ds):
        trainer = SFTTrainer(model=self.model, train_dataset=ds, processing_class=self.tokenizer, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text"))
        trainer.train()
        return trainer
trainer = Fit(model, tokenizer).run(ds)
