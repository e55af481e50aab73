"""QLoRA: a model in 4 bits by bitsandbytes, an adapter by PEFT, and a function that writes the text of each row."""

# ruff: noqa: I001
import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig
from trl import SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True, help="JSON lines of `instruction` and `output`")
parser.add_argument("--output_dir", default="outputs")
parser.add_argument("--max_steps", type=int, default=4)
parser.add_argument("--batch_size", type=int, default=2)
parser.add_argument("--use_cpu", action="store_true")
parser.add_argument("--no_4bit", action="store_true", help="load the model in full precision")
options = parser.parse_args()

dtype = torch.float32 if options.use_cpu else torch.bfloat16
quantization = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=dtype,
)
model = AutoModelForCausalLM.from_pretrained(
    options.model,
    dtype=dtype,
    quantization_config=None if options.no_4bit else quantization,
)
tokenizer = AutoTokenizer.from_pretrained(options.model)
dataset = load_dataset("json", data_files=options.data, split="train")


def formatting_func(row):
    return f"### Instruction:\n{row['instruction']}\n\n### Response:\n{row['output']}"


trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir=options.output_dir,
        max_length=512,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=2,
        max_steps=options.max_steps,
        learning_rate=2e-4,
        logging_steps=1,
        report_to="none",
        use_cpu=options.use_cpu,
        bf16=not options.use_cpu,
    ),
    train_dataset=dataset,
    processing_class=tokenizer,
    peft_config=LoraConfig(
        r=8,
        lora_alpha=16,
        lora_dropout=0.0,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        task_type="CAUSAL_LM",
    ),
    formatting_func=formatting_func,
)
trainer.train()
trainer.save_state()
trainer.save_model(options.output_dir)
