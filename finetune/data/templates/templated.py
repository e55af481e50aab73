"""Whether rows go through the chat template: a model answers as it was asked in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from finetune.data.formats import Format
from finetune.data.templates.markers import derive_markers
from finetune.errors import UserError
from finetune.runtime.types import Tokenizer

LOOKED_AT = 10  # rows of a chunk: all rows of a source are written in the same way


def is_rendered(format: Format, *, has_template: bool) -> bool:
    """Whether the template renders rows of a format."""
    return has_template and not format.of_text and format.name not in ("text", "tokenized")


def turn_marker(tokenizer: Tokenizer, template: str | None) -> str | None:
    """The text that begins an assistant's turn in a chat template; None if it is not known."""
    try:
        return derive_markers(tokenizer, template)[1].strip() or None
    except UserError:
        return None


def is_written_in(rows: Sequence[Mapping[str, object]], format: Format, tokenizer: Tokenizer, marker: str) -> bool:
    """Whether rows of text or token ids were rendered with a chat template before they came here."""
    return any(marker in text for row in rows[:LOOKED_AT] for text in _texts(row, format, tokenizer))


def _texts(row: Mapping[str, object], format: Format, tokenizer: Tokenizer) -> list[str]:
    if format.name == "tokenized":
        ids = row.get(format.columns["input_ids"])
        if isinstance(ids, list | tuple) and all(type(one) is int and one >= 0 for one in ids):
            return [tokenizer.decode(ids)]
        return []
    return ["".join(str(row.get(column, "")) for column in format.columns.values())]


def remedy(format: Format) -> str | None:
    """What to say of rows that the model's chat template does not render although it could; None if their format has no
    turns."""
    if not format.of_text:
        return None
    columns = f"{{instruction: {format.columns['prompt']}, output: {format.columns['completion']}}}"
    return (
        "prompt and completion are trained as they are, without the chat template of the model. With it: "
        f"data.columns: {columns}, or rows of messages"
    )
