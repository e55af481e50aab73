"""Supervised fine-tuning, converted from a notebook: its own code, on any number of GPUs.

    python -m finetune.dryrun qlora_alpaca.py  # next: everything once, on one device
    python -m finetune.advise qlora_alpaca.py  # how many GPUs are worth it
    accelerate launch qlora_alpaca.py          # trains; --finetune training.learning_rate=1e-4 changes a value

`global_batch_size` is the notebook's batch: a step has as many rows on any number of GPUs.
Left out (details in qlora_alpaca.report.json): a branch that installs (cell 1); unused value (cell 2); memory
and time statistics (cells 8, 10); after training (cells 10, 12); the trainer sets the model's mode (cell 12);
inference (cell 12); dead code: `if False:` (cell 15).
Generated from qlora_alpaca.ipynb (sha256 1a1ccf493267b810) by finetune convert 0.2.0. This is a derived work,
so the notebook's license applies.
"""

from finetune import SFTConfig, SFTTrainer  # first: it selects the device and the backend
from unsloth import FastLanguageModel
from datasets import load_dataset
from accelerate import PartialState
from transformers import set_seed


def main() -> None:
    set_seed(3407)  # every rank starts from the same random state
    print = PartialState().print  # once, on the main rank

    # QLoRA on Alpaca
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name="unsloth/mistral-7b-v0.3-bnb-4bit",
        max_seq_length=2048,
        load_in_4bit=True,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=32,
        lora_alpha=32,
        lora_dropout=0,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        bias="none",
        use_gradient_checkpointing="unsloth",
        random_state=3407,
        use_rslora=True,
    )

    # Data
    alpaca_prompt = """Below is an instruction that describes a task, paired with an input that provides further context. Write a response that appropriately completes the request.

### Instruction:
{}

### Input:
{}

### Response:
{}"""
    EOS_TOKEN = tokenizer.eos_token  # must be added

    def formatting_prompts_func(examples):
        instructions = examples["instruction"]
        inputs = examples["input"]
        outputs = examples["output"]
        texts = []
        for instruction, input, output in zip(instructions, inputs, outputs):
            text = alpaca_prompt.format(instruction, input, output) + EOS_TOKEN
            texts.append(text)
        return {
            "text": texts,
        }

    with PartialState().local_main_process_first():  # the other ranks read its cache
        dataset = load_dataset("yahma/alpaca-cleaned", split="train")
        dataset = dataset.map(
            formatting_prompts_func,
            batched=True,
        )
    # A look at the data
    print(dataset)
    for row in dataset.select(range(2)):
        print(row["text"])

    # Training
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=dataset,
        args=SFTConfig(
            dataset_text_field="text",
            max_length=2048,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=8,
            warmup_steps=10,
            max_steps=100,
            learning_rate=2e-4,
            logging_steps=1,
            optim="adamw_8bit",
            weight_decay=0.01,
            lr_scheduler_type="cosine",
            seed=3407,
            output_dir="outputs",
            report_to="none",
        ),
        global_batch_size=16,
    )

    trainer_stats = trainer.train()
    PartialState().wait_for_everyone()
    if PartialState().is_main_process:
        # Save
        model.save_pretrained("mistral_alpaca")
        tokenizer.save_pretrained("mistral_alpaca")


if __name__ == "__main__":
    main()
