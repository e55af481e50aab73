# expect: converted
# cause: Ampere check by compute capability
# %%
import torch
major, _ = torch.cuda.get_device_capability()
if major >= 8:
    !pip install -qqq flash-attn
    dtype, attn = torch.bfloat16, "flash_attention_2"
else:
    dtype, attn = torch.float16, "eager"
# %%
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
q = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=True)
base_model = "meta-llama/Meta-Llama-3-8B"
tokenizer = AutoTokenizer.from_pretrained(base_model)
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(base_model, quantization_config=q, device_map="auto", attn_implementation=attn)
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
dataset = load_dataset("mlabonne/orpo-dpo-mix-40k", split="all").shuffle(seed=42).select(range(10))
dataset = dataset.map(lambda row: {"text": tokenizer.apply_chat_template(row["chosen"], tokenize=False)})
trainer = SFTTrainer(model=model, args=SFTConfig(output_dir="./results/", dataset_text_field="text", max_length=1024, learning_rate=8e-6,
    per_device_train_batch_size=2, gradient_accumulation_steps=4, optim="paged_adamw_8bit"), train_dataset=dataset,
    peft_config=LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM",
    target_modules=["up_proj", "down_proj", "gate_proj", "k_proj", "q_proj", "v_proj", "o_proj"]), processing_class=tokenizer)
trainer.train()
