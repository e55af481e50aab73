# expect: converted
# has: token=hub_token
# hasnot: use_auth_token
# cause: a configuration loaded with use_auth_token, given to the model's loader; a removed name of PEFT
# %%
import torch
import transformers
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_int8_training
from trl import SFTConfig, SFTTrainer

model_id = "meta-llama/Llama-2-7b-chat-hf"
hub_token = "<your token>"
quantized = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)
config = transformers.AutoConfig.from_pretrained(model_id, use_auth_token=hub_token)
model = transformers.AutoModelForCausalLM.from_pretrained(model_id, trust_remote_code=True, config=config, quantization_config=quantized, device_map="auto", use_auth_token=hub_token)
model.eval()
# %%
tokenizer = transformers.AutoTokenizer.from_pretrained(model_id, use_auth_token=hub_token)
tokenizer.pad_token = tokenizer.eos_token
model.resize_token_embeddings(len(tokenizer))
# %%
model = prepare_model_for_int8_training(model)
peft_config = LoraConfig(r=8, lora_alpha=32, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM")
model = get_peft_model(model, peft_config)
rows = load_dataset("acme/notes", split="train").map(lambda row: {"text": row["note"]})
trainer = SFTTrainer(model=model, train_dataset=rows, dataset_text_field="text", tokenizer=tokenizer, max_seq_length=1024, args=transformers.TrainingArguments(output_dir="o", max_steps=9), packing=True, peft_config=peft_config)
for name, module in trainer.model.named_modules():
    if "norm" in name:
        module = module.to(torch.float32)
trainer.train()
