# expect: converted
# cause: the loader is under `if USE_QLORA:`, a constant
# %%
USE_QLORA = True
# %%
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from peft import LoraConfig, prepare_model_for_kbit_training
name = "Qwen/Qwen2.5-7B"
if USE_QLORA:
    bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=bnb, device_map="auto")
    model = prepare_model_for_kbit_training(model)
else:
    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16, device_map="auto")
tok = AutoTokenizer.from_pretrained(name)
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer(model, train_dataset=ds, processing_class=tok, peft_config=LoraConfig(r=16), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
