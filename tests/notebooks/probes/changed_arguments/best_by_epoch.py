# expect: converted
# cause: best model, epoch
# has: load_best_model_at_end=True
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
split = dataset.train_test_split(test_size=0.1, seed=1)
# %%
args = SFTConfig(output_dir="out", num_train_epochs=5, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True)
# %%
trainer = SFTTrainer(model=model, args=args, train_dataset=split["train"], eval_dataset=split["test"], peft_config=peft_config, processing_class=tokenizer)
# %%
trainer.train()
# %%
trainer.save_model("out/final")
