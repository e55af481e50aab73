"""Fine-tune a LoRA adapter with Unsloth on one GPU, learning only the answers of conversations."""

# ruff: noqa: I001
import argparse

from unsloth import FastLanguageModel
from unsloth.chat_templates import train_on_responses_only
import torch
from datasets import load_dataset
from trl import SFTConfig
from trl import SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True, help="JSON lines of `messages`")
parser.add_argument("--output_dir", default="outputs")
parser.add_argument("--max_steps", type=int, default=4)
parser.add_argument("--batch_size", type=int, default=2)
parser.add_argument("--use_cpu", action="store_true")
options = parser.parse_args()

max_seq_length = 512
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name=options.model,
    max_seq_length=max_seq_length,
    dtype=torch.float32 if options.use_cpu else None,
    load_in_4bit=False,
)
model = FastLanguageModel.get_peft_model(
    model,
    r=16,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    lora_alpha=16,
    lora_dropout=0,
    bias="none",
    use_gradient_checkpointing="unsloth",
    random_state=3407,
)


def render(examples):
    return {"text": [tokenizer.apply_chat_template(talk, tokenize=False) for talk in examples["messages"]]}


dataset = load_dataset("json", data_files=options.data, split="train")
dataset = dataset.map(render, batched=True, remove_columns=dataset.column_names)

trainer = SFTTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=dataset,
    args=SFTConfig(
        dataset_text_field="text",
        max_length=max_seq_length,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=2,
        warmup_steps=1,
        max_steps=options.max_steps,
        learning_rate=2e-4,
        logging_steps=1,
        optim="adamw_torch" if options.use_cpu else "adamw_8bit",
        weight_decay=0.01,
        lr_scheduler_type="linear",
        seed=3407,
        output_dir=options.output_dir,
        report_to="none",
        use_cpu=options.use_cpu,
        bf16=not options.use_cpu,
    ),
)
trainer = train_on_responses_only(
    trainer,
    instruction_part="<|im_start|>user\n",
    response_part="<|im_start|>assistant\n",
)
trainer.train()
trainer.save_state()
trainer.save_model(options.output_dir)
