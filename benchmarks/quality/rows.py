"""Rows of question and answer as tokens and labels, for the judge and the peers: independent of `finetune`."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

IGNORED = -100


def read(file: Path | str) -> list[dict[str, str]]:
    """JSON lines of {"question", "answer"}."""
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]


def write(file: Path, rows: list[dict[str, str]]) -> Path:
    """JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def sums(count: int, seed: int) -> list[dict[str, str]]:
    """Short rows of the same form, for `--smoke`."""
    draw = random.Random(seed)
    pairs = [(draw.randrange(10, 90), draw.randrange(10, 90)) for _ in range(count)]
    return [{"question": f"{a} + {b}?", "answer": f"{a} + {b} = <<{a}+{b}={a + b}>>\n#### {a + b}"} for a, b in pairs]


def prompt(tokenizer: Any, row: dict[str, str]) -> str:
    """The rendered question, up to where the answer begins."""
    asked = [{"role": "user", "content": row["question"]}]
    return tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)


def text(row: dict[str, str]) -> str:
    """The row for a model without a chat template."""
    return f"{row['question']}\n{row['answer']}"


def encode(tokenizer: Any, row: dict[str, str], as_text: bool) -> dict[str, list[int]]:
    """`input_ids` and `labels` of a row.

    Supervised are the answer and its end-of-turn token, not the line break that templates write after it; of text,
    all tokens and the end of text.
    """
    if as_text:
        ids = [*tokenizer(text(row))["input_ids"], tokenizer.eos_token_id]
        return {"input_ids": ids, "labels": ids}
    turns = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
    whole = tokenizer.apply_chat_template(turns, tokenize=False)
    begin, end = len(prompt(tokenizer, row)), len(whole.rstrip())
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    ids = encoded["input_ids"]
    inside = [begin <= first and last <= end for first, last in encoded["offset_mapping"]]
    return {"input_ids": ids, "labels": [one if kept else IGNORED for one, kept in zip(ids, inside, strict=True)]}
