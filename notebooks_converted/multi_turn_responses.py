"""Supervised fine-tuning, converted from a notebook: its own code, on any number of GPUs.

    python -m finetune.dryrun multi_turn_responses.py  # next: everything once, on one device
    python -m finetune.advise multi_turn_responses.py  # how many GPUs are worth it
    accelerate launch multi_turn_responses.py          # trains; --finetune training.learning_rate=1e-4 changes a value

`global_batch_size` is the notebook's batch: a step has as many rows on any number of GPUs.
Left out (details in multi_turn_responses.report.json): a branch that installs (cell 1); display (cells 9, 14,
15); memory and time statistics (cells 16, 18); after training (cells 18, 20); inference (cell 20); dead code:
`if False:` (cell 23).
Generated from multi_turn_responses.ipynb (sha256 77badd00284eb733) by finetune convert 0.2.0. This is a
derived work, so the notebook's license applies.
"""

from finetune import SFTConfig, SFTTrainer  # first: it selects the device and the backend
from unsloth import FastModel
from unsloth.chat_templates import get_chat_template
from unsloth.chat_templates import train_on_responses_only
from datasets import load_dataset
from accelerate import PartialState
from transformers import set_seed


def main() -> None:
    set_seed(3407)  # every rank starts from the same random state

    # Unsloth
    max_seq_length = 2048
    model, tokenizer = FastModel.from_pretrained(
        model_name="unsloth/gemma-3-270m-it",
        max_seq_length=max_seq_length,
        load_in_4bit=False,
        load_in_8bit=False,
        full_finetuning=False,
        # token = "hf_...",
    )

    model = FastModel.get_peft_model(
        model,
        r=64,
        lora_alpha=64,
        lora_dropout=0,
        bias="none",
        target_modules=[
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ],
        use_gradient_checkpointing="unsloth",
        random_state=3407,
        use_rslora=False,
        loftq_config=None,
    )

    # Data
    tokenizer = get_chat_template(
        tokenizer,
        chat_template="gemma3",
    )

    with PartialState().local_main_process_first():  # the other ranks read its cache
        dataset = load_dataset("HuggingFaceTB/smoltalk", "everyday-conversations", split="train")
        dataset = dataset.train_test_split(test_size=0.05, seed=3407)

        def formatting_prompts_func(examples):
            convos = examples["messages"]
            texts = [
                tokenizer.apply_chat_template(convo, tokenize=False, add_generation_prompt=False).removeprefix("<bos>")
                for convo in convos
            ]
            return {
                "text": texts,
            }

        train_dataset = dataset["train"].map(formatting_prompts_func, batched=True)
        eval_dataset = dataset["test"].map(formatting_prompts_func, batched=True)
    # Training
    trainer = SFTTrainer(
        model=model,
        tokenizer=tokenizer,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        args=SFTConfig(
            dataset_text_field="text",
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            warmup_steps=5,
            # num_train_epochs = 1, # for a whole run
            max_steps=100,
            learning_rate=5e-5,
            eval_strategy="steps",
            eval_steps=50,
            logging_steps=1,
            optim="adamw_8bit",
            weight_decay=0.01,
            lr_scheduler_type="linear",
            seed=3407,
            output_dir="outputs",
            report_to="none",
        ),
        global_batch_size=8,
    )

    trainer = train_on_responses_only(
        trainer,
        instruction_part="<start_of_turn>user\n",
        response_part="<start_of_turn>model\n",
    )

    trainer_stats = trainer.train()
    PartialState().wait_for_everyone()
    if PartialState().is_main_process:
        # Saving
        model.save_pretrained("gemma_conversations")
        tokenizer.save_pretrained("gemma_conversations")


if __name__ == "__main__":
    main()
