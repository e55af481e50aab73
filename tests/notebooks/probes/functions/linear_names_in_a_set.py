# expect: converted
# cause: names that a function of the notebook collects in a set, called by a function that is called once
# %%
import bitsandbytes as bnb
import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainingArguments
from trl import SFTTrainer

def linear_names(model):
    found = set()
    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            parts = name.split(".")
            found.add(parts[0] if len(parts) == 1 else parts[-1])
    return list(found)

def load(name):
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16, quantization_config=quantized)
    return prepare_model_for_kbit_training(model)

def adapt(model):
    config = LoraConfig(r=8, lora_alpha=16, target_modules=linear_names(model), task_type="CAUSAL_LM")
    return get_peft_model(model, config)

def prepare(model, rows, tokenizer):
    args = TrainingArguments(output_dir="o", max_steps=9)
    return SFTTrainer(model, train_dataset=rows, dataset_text_field="text", tokenizer=tokenizer, max_seq_length=512, args=args)

def train(trainer, folder):
    trainer.train()
    trainer.save_model(folder)

# %%
model_name = "codellama/CodeLlama-7b-hf"
rows = load_dataset("acme/notes", split="train").map(lambda row: {"text": row["note"]})
tokenizer = AutoTokenizer.from_pretrained(model_name)
model = load(model_name)
model = adapt(model)
trainer = prepare(model, rows, tokenizer)
train(trainer, "o")
