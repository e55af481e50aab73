"""LoRA of unsloth/Llama-3.2-1B-Instruct, converted from a notebook.

    accelerate launch lora_messages.py
    python lora_messages.py --dry-run

Settings: lora_messages.yaml, or on the command line as --section.key VALUE; --help lists them.
Generated from lora_messages.ipynb (sha256 64ea92aca5c0ee66) by finetune convert 0.1.0. This is a derived
work, so the notebook's license applies. What was left out, and why: lora_messages.report.json
"""

from finetune import script


def prepare_tokenizer(tokenizer):
    from unsloth.chat_templates import get_chat_template

    # Data
    tokenizer = get_chat_template(
        tokenizer,
        chat_template="llama-3.1",
    )
    return tokenizer


def build_dataset(tokenizer):
    from unsloth.chat_templates import standardize_sharegpt
    from datasets import load_dataset

    # Data
    def formatting_prompts_func(examples):
        convos = examples["conversations"]
        texts = [tokenizer.apply_chat_template(convo, tokenize=False, add_generation_prompt=False) for convo in convos]
        return {
            "text": texts,
        }

    dataset = load_dataset("mlabonne/FineTome-100k", split="train")
    dataset = standardize_sharegpt(dataset)
    dataset = dataset.map(
        formatting_prompts_func,
        batched=True,
    )
    return dataset


def main() -> int:
    return script.run(__file__, dataset=build_dataset, tokenizer=prepare_tokenizer)


if __name__ == "__main__":
    raise SystemExit(main())
