"""Where a trained model stops, and the generation_config.json that says so."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data import IGNORE_INDEX
from finetune.data.store import Rows
from finetune.data.templates.chat_templates import load_template
from finetune.data.templates.spans import end_of_turn
from finetune.engine.sharding import shard
from finetune.errors import UserError
from finetune.runtime import files
from finetune.runtime.types import JsonObject, Model, Tokenizer

FILE = "generation_config.json"
SAMPLED_ROWS = 1000


def check(folder: Path) -> None:
    """Check that transformers can load a model's generation config.

    Raises:
        UserError: it cannot; it names the file.
    """
    from transformers import GenerationConfig

    if not (folder / FILE).is_file():
        return
    why = None
    try:
        ends = GenerationConfig.from_pretrained(str(folder)).eos_token_id
        if ends is not None and not to_token_ids(ends):
            why = f"eos_token_id must be a number or a list of numbers: {ends!r}"
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = " ".join(str(error).split())[:300]
    if why is not None:
        raise UserError(f"{folder / FILE} is invalid: {why.rstrip('.')}. Correct it, or remove the file.")


def trained_end_tokens(tokenizer: Tokenizer, rows: Rows) -> list[int]:
    """The tokens that training taught the model to stop at: the one that ends a turn of the tokenizer's chat template,
    if it is supervised, and any added token that ends most rows. Rows that were cut end anywhere."""
    added = set(tokenizer.added_tokens_decoder)
    last: Counter[int] = Counter()
    supervised: set[int] = set()
    sample = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), SAMPLED_ROWS)).astype(int))
    for index in sample.tolist():
        labels = rows[index][1]
        labels = labels[labels != IGNORE_INDEX]
        if len(labels):
            last[int(labels[-1])] += 1
            supervised.update(labels.tolist())
    ends = {token for token, count in last.items() if token in added and 2 * count >= last.total()}
    turn = end_of_turn_token(tokenizer)
    return sorted(ends | ({turn} & supervised if turn is not None else set()))


def end_of_turn_token(tokenizer: Tokenizer) -> int | None:
    """The token that ends an assistant turn of the tokenizer's chat template; None if no single token does."""
    ending = end_of_turn_text(tokenizer)
    return None if ending is None else first_added_token(tokenizer, ending)


def end_of_turn_text(tokenizer: Tokenizer) -> str | None:
    """The text that ends an assistant turn of the tokenizer's chat template; None if it is not known."""
    try:
        template = load_template(tokenizer)
    except UserError:  # of several variants, or invalid: rows that need it are refused earlier
        return None
    return None if template is None else end_of_turn(tokenizer, template)


def first_added_token(tokenizer: Tokenizer, ending: str) -> int | None:
    """The first added token in a text, at which generation stops; None if it has only ordinary ones."""
    added = tokenizer.added_tokens_decoder
    return next((token for token in tokenizer(ending, add_special_tokens=False)["input_ids"] if token in added), None)


def end_tokens_in_file(folder: Path) -> list[int]:
    """The end tokens in a folder's generation_config.json; empty without one, or if it names none."""
    try:
        content = files.read_json(folder / FILE)
    except (OSError, ValueError):
        return []
    return to_token_ids(content.get("eos_token_id")) if isinstance(content, dict) else []


def to_token_ids(value: Any) -> list[int]:
    """`eos_token_id` of a configuration, which is a number, a list or nothing, as a list."""
    return [one for one in (value if isinstance(value, list | tuple) else [value]) if type(one) is int]


def add_end_tokens(content: JsonObject, ends: Iterable[int | None]) -> JsonObject:
    """The content of a generation_config.json with further end tokens; its own stay first."""
    known = list(dict.fromkeys([*to_token_ids(content.get("eos_token_id")), *(one for one in ends if one is not None)]))
    return content | ({"eos_token_id": known[0] if len(known) == 1 else known} if known else {})


def write(folder: Path, model: Model, ends: Iterable[int | None]) -> None:
    """Write generation_config.json: that of the model, if it has one, which stops at `ends` as well. Values that
    transformers accepts when it loads them and refuses when it saves them, such as a temperature without sampling,
    stay as they are.

    Raises:
        UserError: it holds something that is not JSON.
    """
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    try:
        content = json.loads(config.to_json_string(keys_to_pop=["compile_config"]))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"The model's generation config cannot be saved: {error}. Correct {FILE} in the model's folder."
        ) from None
    files.write_json(folder / FILE, add_end_tokens(content, ends))


@contextlib.contextmanager
def without_model_config(model: Model) -> Iterator[None]:
    """Context in which `save_pretrained` writes a default generation config, which `write` then replaces: transformers
    checks the model's own when it saves it."""
    owner = shard.base_model(model)
    own = getattr(owner, "generation_config", None)
    if own is None:
        yield
        return
    owner.generation_config = type(own)()
    try:
        yield
    finally:
        owner.generation_config = own
