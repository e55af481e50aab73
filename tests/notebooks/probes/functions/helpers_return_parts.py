# expect: converted
# cause: functional style: each part is returned by a function called once
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig, get_peft_model
from trl import SFTConfig, SFTTrainer
def get_tokenizer(n):
    t = AutoTokenizer.from_pretrained(n)
    t.pad_token = t.eos_token
    return t
def get_model(n):
    m = AutoModelForCausalLM.from_pretrained(n)
    return get_peft_model(m, LoraConfig(r=32, lora_alpha=64))
def get_data(t):
    return load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"] + t.eos_token})
def get_args():
    return SFTConfig(output_dir="parts", learning_rate=1e-4, dataset_text_field="text")
NAME = "Qwen/Qwen2.5-0.5B"
tok = get_tokenizer(NAME); model = get_model(NAME); data = get_data(tok)
trainer = SFTTrainer(model=model, args=get_args(), train_dataset=data, processing_class=tok)
trainer.train()
