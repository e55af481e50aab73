# expect: converted
# cause: dtype chosen by device: bfloat16 where supported, else float16; auto says the same
# fast
# %%
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
compute = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
name = "Qwen/Qwen2.5-1.5B"
model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=compute, device_map="auto")
tokenizer = AutoTokenizer.from_pretrained(name)
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
SFTTrainer(model=model, train_dataset=ds, args=SFTConfig(output_dir="o", dataset_text_field="text", bf16=torch.cuda.is_bf16_supported(),
           fp16=not torch.cuda.is_bf16_supported()), peft_config=LoraConfig()).train()
