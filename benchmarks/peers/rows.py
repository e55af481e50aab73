"""Rows of text with given numbers of tokens, cut from a corpus."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

ROWS = {"own": 4000, "real": 6000, "2048": 1200, "4096": 700, "16384": 200, "short": 400} | dict.fromkeys(
    ("32768", "65536", "131072", "262144", "327680"), 6
)
MU, SIGMA, SHORTEST = 6.0, 0.8, 32  # of the lognormal lengths: a median of 403 tokens, a mean of 550
TRIES = 40


def build(file: Path, kind: str, longest: int, tokenizer: Any, corpus: Path) -> dict[str, float]:
    """Write JSON lines of {"text"} whose rows, with the end token that each stack adds, have the lengths of `kind`:
    lognormal for "real" and "short", those of the corpus for "own", else `longest` each. Returns rows, tokens and
    squared_over_tokens.

    A text is a piece of the corpus that is encoded to exactly as many tokens again; pieces that are not are passed
    over.
    """
    about = file.with_suffix(".json")
    if about.is_file():
        return json.loads(about.read_text())
    texts = [" ".join(map(str, json.loads(line).values())) for line in corpus.read_text(encoding="utf-8").splitlines()]
    own = texts[: ROWS[kind]] if kind == "own" else []
    own_ids = tokenizer(own, add_special_tokens=False)["input_ids"] if own else []
    lengths = [min(longest, len(ids) + 1) for ids in own_ids]
    ids = tokenizer("\n".join(texts), add_special_tokens=False)["input_ids"]
    generator = random.Random(7)
    with file.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps({"text": text}) + "\n" for text in own)
        for _ in range(0 if own else ROWS[kind]):
            length = longest
            if kind in ("real", "short"):
                drawn = int(generator.lognormvariate(MU if kind == "real" else 3.0, SIGMA))
                length = max(8 if kind == "short" else SHORTEST, min(longest, drawn))
            out.write(json.dumps({"text": piece(ids, length - 1, tokenizer, generator)}) + "\n")
            lengths.append(length)
    tokens = sum(lengths)
    found = {"rows": len(lengths), "tokens": tokens, "squared_over_tokens": sum(n * n for n in lengths) / tokens}
    about.write_text(json.dumps(found))
    return found


def piece(ids: list[int], length: int, tokenizer: Any, generator: random.Random) -> str:
    """A text of `length` tokens from a random place of the corpus."""
    for _ in range(TRIES):
        begin = generator.randrange(len(ids) - length)
        text = tokenizer.decode(ids[begin : begin + length])
        if len(tokenizer(text, add_special_tokens=False)["input_ids"]) == length:
            return text
    raise ValueError(f"no piece of the corpus is encoded to {length} tokens again")
