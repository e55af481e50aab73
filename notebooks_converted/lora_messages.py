"""Supervised fine-tuning, converted from a notebook: its own code, on any number of GPUs.

    python -m finetune.dryrun lora_messages.py  # next: everything once, on one device
    python -m finetune.advise lora_messages.py  # how many GPUs are worth it
    accelerate launch lora_messages.py          # trains; --finetune training.learning_rate=1e-4 changes a value

`global_batch_size` is the notebook's batch: a step has as many rows on any number of GPUs.
Left out (details in lora_messages.report.json): a branch that installs (cell 2); display (cells 11, 12, 19);
memory and time statistics (cells 15, 17); after training (cells 17, 19); the trainer sets the model's mode
(cell 19); inference (cell 19); dead code: `if False:` (cells 22, 23).
Generated from lora_messages.ipynb (sha256 64ea92aca5c0ee66) by finetune convert 0.2.0. This is a derived
work, so the notebook's license applies.
"""

from finetune import SFTConfig, SFTTrainer  # first: it selects the device and the backend
from unsloth import FastLanguageModel
from unsloth.chat_templates import get_chat_template
from unsloth.chat_templates import standardize_sharegpt
from datasets import load_dataset
from accelerate import PartialState
from transformers import set_seed


def main() -> None:
    set_seed(3407)  # every rank starts from the same random state

    # Model
    max_seq_length = 2048  # Any length; RoPE scaling is done for you
    dtype = None  # None finds it out. float16 for T4 and V100, bfloat16 for Ampere and newer
    load_in_4bit = False  # True needs less memory
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name="unsloth/Llama-3.2-1B-Instruct",
        max_seq_length=max_seq_length,
        dtype=dtype,
        load_in_4bit=load_in_4bit,
        # token = "hf_...", # for gated models
    )

    model = FastLanguageModel.get_peft_model(
        model,
        r=16,  # 8, 16, 32, 64, 128
        target_modules=[
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ],
        lora_alpha=16,
        lora_dropout=0,  # 0 is the fast one
        bias="none",  # "none" is the fast one
        use_gradient_checkpointing="unsloth",  # for very long context
        random_state=3407,
        use_rslora=False,
        loftq_config=None,
    )

    # Data
    tokenizer = get_chat_template(
        tokenizer,
        chat_template="llama-3.1",
    )

    def formatting_prompts_func(examples):
        convos = examples["conversations"]
        texts = [tokenizer.apply_chat_template(convo, tokenize=False, add_generation_prompt=False) for convo in convos]
        return {
            "text": texts,
        }

    with PartialState().local_main_process_first():  # the other ranks read its cache
        dataset = load_dataset("mlabonne/FineTome-100k", split="train")
        dataset = standardize_sharegpt(dataset)
        dataset = dataset.map(
            formatting_prompts_func,
            batched=True,
        )
    # Training
    trainer = SFTTrainer(
        model=model,
        tokenizer=tokenizer,
        train_dataset=dataset,
        dataset_text_field="text",
        max_seq_length=max_seq_length,
        packing=False,  # Can make training of short sequences faster
        args=SFTConfig(
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            warmup_steps=5,
            # num_train_epochs = 1, # for a whole run
            max_steps=60,
            learning_rate=2e-4,
            logging_steps=1,
            optim="adamw_8bit",
            weight_decay=0.001,
            lr_scheduler_type="linear",
            seed=3407,
            output_dir="outputs",
            report_to="none",  # or wandb
        ),
        global_batch_size=8,
    )

    trainer_stats = trainer.train()
    PartialState().wait_for_everyone()
    if PartialState().is_main_process:
        # Saving
        model.save_pretrained("llama_lora")  # here
        tokenizer.save_pretrained("llama_lora")


if __name__ == "__main__":
    main()
