"""Supervised fine-tuning, converted from a notebook: its own code, on any number of GPUs.

    python -m finetune.dryrun full_text.py  # next: everything once, on one device
    python -m finetune.advise full_text.py  # how many GPUs are worth it
    accelerate launch full_text.py          # trains; --finetune training.learning_rate=1e-4 changes a value

`global_batch_size` is the notebook's batch: a step has as many rows on any number of GPUs.
Left out (details in full_text.report.json): after training (cells 8, 9); inference (cell 9); dead code: `if
False:` (cell 11).
Generated from full_text.ipynb (sha256 da1748b2bb214836) by finetune convert 0.2.0. This is a derived work, so
the notebook's license applies.
"""

import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from finetune import SFTConfig, SFTTrainer  # first: it selects the device and the backend
from unsloth import FastLanguageModel
from datasets import load_dataset
from accelerate import PartialState
from transformers import set_seed


def main() -> None:
    set_seed(3407)  # every rank starts from the same random state
    print = PartialState().print  # once, on the main rank

    # Install
    max_seq_length = 1024
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name="unsloth/Qwen3-0.6B-Base",
        max_seq_length=max_seq_length,
        load_in_4bit=False,
        full_finetuning=True,  # no adapter
    )

    with PartialState().local_main_process_first():  # the other ranks read its cache
        # Stories
        dataset = load_dataset("roneneldan/TinyStories", split="train[:20000]")
        dataset = dataset.filter(lambda row: len(row["text"].strip()) > 0)
        EOS_TOKEN = tokenizer.eos_token

        def end_each_story(examples):
            return {"story": [text.strip() + EOS_TOKEN for text in examples["text"]]}

        dataset = dataset.map(end_each_story, batched=True, remove_columns=["text"])
    print(dataset[0]["story"][:200])

    # Train
    trainer = SFTTrainer(
        model=model,
        tokenizer=tokenizer,
        train_dataset=dataset,
        args=SFTConfig(
            dataset_text_field="story",
            max_seq_length=max_seq_length,
            packing=True,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=4,
            num_train_epochs=1,
            warmup_steps=20,
            learning_rate=2e-5,
            logging_steps=5,
            save_steps=200,
            optim="adamw_8bit",
            weight_decay=0.0,
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
        model.save_pretrained("story_model")
        tokenizer.save_pretrained("story_model")


if __name__ == "__main__":
    main()
