# expect: converted
# cause: a condition on the text of a device
# %%
import torch
def get_device():
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("cpu")
device = get_device()
use_cuda = torch.cuda.is_available() and "cuda" in str(device).lower()
on_gpu = device.type == "cuda"
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
quantization_config = None
if use_cuda and on_gpu:
    quantization_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-1.7B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-1.7B", quantization_config=quantization_config, device_map="auto")
ds = load_dataset("trl-lib/Capybara", split="train")
SFTTrainer(model=model, args=SFTConfig(output_dir="o", max_steps=10), train_dataset=ds, processing_class=tokenizer, peft_config=LoraConfig(r=16, target_modules="all-linear")).train()
