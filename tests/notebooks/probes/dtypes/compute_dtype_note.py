# expect: converted
# kept or named: bnb_4bit_compute_dtype
# cause: bnb_4bit_compute_dtype=float16 is not a setting; it must be named
# %%
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainingArguments
from peft import LoraConfig
from trl import SFTTrainer
from datasets import load_dataset
use_4bit = True
bnb_4bit_compute_dtype = "float16"
compute_dtype = getattr(torch, bnb_4bit_compute_dtype)
bnb_config = BitsAndBytesConfig(load_in_4bit=use_4bit, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute_dtype, bnb_4bit_use_double_quant=False)
model = AutoModelForCausalLM.from_pretrained("NousResearch/Llama-2-7b-chat-hf", quantization_config=bnb_config, device_map={"": 0})
model.config.use_cache = False
model.config.pretraining_tp = 1
tokenizer = AutoTokenizer.from_pretrained("NousResearch/Llama-2-7b-chat-hf", trust_remote_code=True)
tokenizer.pad_token = tokenizer.eos_token
tokenizer.padding_side = "right"
dataset = load_dataset("mlabonne/guanaco-llama2-1k", split="train")
peft_config = LoraConfig(lora_alpha=16, lora_dropout=0.1, r=64, bias="none", task_type="CAUSAL_LM")
training_arguments = TrainingArguments(output_dir="./results", num_train_epochs=1, per_device_train_batch_size=4, optim="paged_adamw_32bit",
    save_steps=0, logging_steps=25, learning_rate=2e-4, weight_decay=0.001, max_grad_norm=0.3, max_steps=-1, warmup_ratio=0.03,
    group_by_length=True, lr_scheduler_type="cosine", report_to="tensorboard")
trainer = SFTTrainer(model=model, train_dataset=dataset, peft_config=peft_config, dataset_text_field="text", max_seq_length=None,
                     tokenizer=tokenizer, args=training_arguments, packing=False)
trainer.train()
trainer.model.save_pretrained("Llama-2-7b-chat-finetune")
