"""full fine-tuning of unsloth/Qwen3-0.6B-Base, converted from a notebook.

    accelerate launch full_text.py
    python full_text.py --dry-run

Settings: full_text.yaml, or on the command line as --section.key VALUE; --help lists them.
Generated from full_text.ipynb (sha256 da1748b2bb214836) by finetune convert 0.1.0. This is a derived work, so
the notebook's license applies. What was left out, and why: full_text.report.json
"""

import os

# Set before the imports, because libraries read these when they are imported.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from finetune import script


def build_dataset(tokenizer):
    from datasets import load_dataset

    # Stories
    dataset = load_dataset("roneneldan/TinyStories", split="train[:20000]")
    dataset = dataset.filter(lambda row: len(row["text"].strip()) > 0)
    EOS_TOKEN = tokenizer.eos_token

    def end_each_story(examples):
        return {"story": [text.strip() + EOS_TOKEN for text in examples["text"]]}

    dataset = dataset.map(end_each_story, batched=True, remove_columns=["text"])
    return dataset


def main() -> int:
    return script.run(__file__, dataset=build_dataset)


if __name__ == "__main__":
    raise SystemExit(main())
