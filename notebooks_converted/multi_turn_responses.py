"""LoRA of unsloth/gemma-3-270m-it, converted from a notebook.

    accelerate launch multi_turn_responses.py
    python multi_turn_responses.py --dry-run

Settings: multi_turn_responses.yaml, or on the command line as --section.key VALUE; --help lists them.
Generated from multi_turn_responses.ipynb (sha256 77badd00284eb733) by finetune convert 0.1.0. This is a
derived work, so the notebook's license applies. What was left out, and why: multi_turn_responses.report.json
"""

from finetune import script


def prepare_tokenizer(tokenizer):
    from unsloth.chat_templates import get_chat_template

    # Data
    tokenizer = get_chat_template(
        tokenizer,
        chat_template="gemma3",
    )
    return tokenizer


def build_dataset(tokenizer):
    from datasets import load_dataset

    # Data
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
    return train_dataset, eval_dataset


def main() -> int:
    return script.run(__file__, dataset=build_dataset, tokenizer=prepare_tokenizer)


if __name__ == "__main__":
    raise SystemExit(main())
