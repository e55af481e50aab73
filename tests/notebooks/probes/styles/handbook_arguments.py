# expect: converted
# cause: model_init_kwargs and log_level as TRL 0.7 took them
# %%
from datasets import load_dataset
from transformers import AutoTokenizer, BitsAndBytesConfig, TrainingArguments
from peft import LoraConfig
from trl import SFTTrainer
import torch
name = "mistralai/Mistral-7B-v0.1"
tok = AutoTokenizer.from_pretrained(name)
rows = load_dataset("acme/chats", split="train").map(lambda r: {"text": tok.apply_chat_template(r["messages"], tokenize=False)})
kwargs = dict(quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16),
              torch_dtype="auto", use_cache=False, device_map={"": 0})
args = TrainingArguments(output_dir="o", log_level="info", bf16=True, max_steps=50, learning_rate=2e-5)
trainer = SFTTrainer(model=name, model_init_kwargs=kwargs, args=args, train_dataset=rows, dataset_text_field="text", tokenizer=tok,
                     max_seq_length=1024, peft_config=LoraConfig(r=16))
trainer.train()
