# expect: converted
# cause: names of layers in a set, whose order differs from process to process, in a function that is called once
# %%
import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from trl import SFTTrainer

def adapted(model):
    layers = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    config = LoraConfig(r=32, lora_alpha=16, target_modules=list(layers), task_type="CAUSAL_LM")
    return get_peft_model(model, config)

# %%
tokenizer = AutoTokenizer.from_pretrained("codellama/CodeLlama-7b-hf")
base = AutoModelForCausalLM.from_pretrained("codellama/CodeLlama-7b-hf", torch_dtype=torch.bfloat16)
base = adapted(base)
rows = load_dataset("acme/notes", split="train").map(lambda row: {"text": row["note"]})
trainer = SFTTrainer(base, train_dataset=rows, tokenizer=tokenizer, args=TrainingArguments(output_dir="o"), dataset_text_field="text")
trainer.train()
