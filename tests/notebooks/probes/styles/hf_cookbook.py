# expect: converted
# cause: a blog's style: messages from a JSON file that the notebook wrote
# %%
from datasets import load_dataset
system_message = """You are a text to SQL query translator.
SCHEMA:
{schema}"""
def create_conversation(sample):
    return {"messages": [
        {"role": "system", "content": system_message.format(schema=sample["context"])},
        {"role": "user", "content": sample["question"]},
        {"role": "assistant", "content": sample["answer"]}]}
dataset = load_dataset("b-mc2/sql-create-context", split="train").shuffle().select(range(12500))
dataset = dataset.map(create_conversation, remove_columns=dataset.features, batched=False)
dataset = dataset.train_test_split(test_size=2500/12500)
dataset["train"].to_json("train_dataset.json", orient="records")
dataset["test"].to_json("test_dataset.json", orient="records")
# %%
dataset = load_dataset("json", data_files="train_dataset.json", split="train")
# %%
import torch
from transformers import AutoTokenizer, AutoModelForCausalLM, BitsAndBytesConfig
model_id = "codellama/CodeLlama-7b-hf"
model = AutoModelForCausalLM.from_pretrained(model_id, device_map="auto", attn_implementation="flash_attention_2", torch_dtype=torch.bfloat16,
    quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16))
tokenizer = AutoTokenizer.from_pretrained(model_id)
tokenizer.padding_side = "right"
tokenizer.chat_template = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + eos_token }}{% endfor %}"
# %%
from peft import LoraConfig
from trl import SFTTrainer
from transformers import TrainingArguments
peft_config = LoraConfig(lora_alpha=128, lora_dropout=0.05, r=256, bias="none", target_modules="all-linear", task_type="CAUSAL_LM")
args = TrainingArguments(output_dir="code-llama-7b-text-to-sql", num_train_epochs=3, per_device_train_batch_size=3, gradient_accumulation_steps=4,
    gradient_checkpointing=True, optim="adamw_torch_fused", logging_steps=10, save_strategy="epoch", learning_rate=2e-4, bf16=True, tf32=True,
    max_grad_norm=0.3, warmup_ratio=0.03, lr_scheduler_type="constant", push_to_hub=True, report_to="tensorboard")
max_seq_length = 3072
trainer = SFTTrainer(model=model, args=args, train_dataset=dataset, peft_config=peft_config, max_seq_length=max_seq_length, tokenizer=tokenizer, packing=True,
    dataset_kwargs={"add_special_tokens": False, "append_concat_token": False})
trainer.train()
trainer.save_model()
