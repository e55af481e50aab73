# expect: converted
# cause: function sets t.args; SFTTrainer refuses changed arguments when the script runs
# has: t.args.learning_rate = 1e-5
# %%
import torch, os, json, random
from datasets import load_dataset, Dataset, concatenate_datasets
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainingArguments, TrainerCallback
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training, PeftModel
from trl import SFTTrainer, SFTConfig
# %%
model_id = "meta-llama/Llama-3.2-1B"
tokenizer = AutoTokenizer.from_pretrained(model_id)
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(model_id, torch_dtype=torch.bfloat16, device_map="auto")
# %%
peft_config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
# %%
dataset = load_dataset("acme/answers", split="train")
def to_text(row):
    return {"text": f"### Question: {row['question']}\n### Answer: {row['answer']}" + tokenizer.eos_token}
dataset = dataset.map(to_text)
# %%
args = SFTConfig(output_dir="out", per_device_train_batch_size=2, gradient_accumulation_steps=4, learning_rate=2e-4, max_steps=60, logging_steps=5, max_length=512, dataset_text_field="text", report_to="none")
# %%
trainer = SFTTrainer(model=model, args=args, train_dataset=dataset, peft_config=peft_config, processing_class=tokenizer)
# %%
def fix(t):
    t.args.learning_rate = 1e-5
fix(trainer)
# %%
trainer.train()
# %%
trainer.save_model("out/final")
