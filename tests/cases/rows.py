"""What `finetune prepare` wrote, as text."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from transformers import AutoTokenizer


def marked_rows(folder: Path, cache: str, split: str = "train") -> list[str]:
    """The documents of a cache folder as text, supervised tokens in [[ ]], with the tokenizer of the model ./m."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "m")
    (file,) = (folder / cache).rglob(f"{split}.arrow")
    with pa.memory_map(str(file)) as source:
        rows = pa.ipc.open_stream(source).read_all().to_pylist()
    return ["".join(_parts(tokenizer, row)).replace("]][[", "") for row in rows]


def _parts(tokenizer, row: dict[str, list[int]]) -> list[str]:
    pairs = zip(row["input_ids"], row["labels"], strict=True)
    return [f"[[{tokenizer.decode([i])}]]" if label != -100 else tokenizer.decode([i]) for i, label in pairs]
