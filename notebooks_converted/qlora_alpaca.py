"""QLoRA of unsloth/mistral-7b-v0.3-bnb-4bit, converted from a notebook.

    accelerate launch qlora_alpaca.py
    python qlora_alpaca.py --dry-run

Settings: qlora_alpaca.yaml, or on the command line as --section.key VALUE; --help lists them.
Generated from qlora_alpaca.ipynb (sha256 1a1ccf493267b810) by finetune convert 0.1.0. This is a derived work,
so the notebook's license applies. What was left out, and why: qlora_alpaca.report.json
"""

from finetune import script


def build_dataset(tokenizer):
    from datasets import load_dataset

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

    dataset = load_dataset("yahma/alpaca-cleaned", split="train")
    dataset = dataset.map(
        formatting_prompts_func,
        batched=True,
    )
    return dataset


def main() -> int:
    return script.run(__file__, dataset=build_dataset)


if __name__ == "__main__":
    raise SystemExit(main())
