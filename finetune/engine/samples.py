"""The model's own answers to held-out prompts, next to the right ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from finetune.data import IGNORE_INDEX
from finetune.data.store import Rows
from finetune.engine import shard
from finetune.engine.model import generate
from finetune.runtime import activity, distributed

MOST_NEW_TOKENS = 256
SPARE_TOKENS = 8  # beyond the longest right answer: room to be wrong in


@dataclass(frozen=True, kw_only=True)
class Question:
    """A held-out prompt, up to where the assistant speaks for the last time, and what it should say."""

    prompt: list[int]
    reference: str
    answer_tokens: int


def questions(rows: Rows, tokenizer: Any, count: int) -> list[Question]:
    """The first `count` rows that end in a supervised answer to a prompt; fully supervised rows have no prompt."""
    found: list[Question] = []
    for index in range(len(rows)):
        if len(found) == count:
            break
        ids, labels = rows[index]
        supervised = np.flatnonzero(labels != IGNORE_INDEX)
        breaks = np.flatnonzero(np.diff(supervised) > 1)
        start = int(supervised[breaks[-1] + 1] if len(breaks) else supervised[0])
        if start > 1:
            end = int(supervised[-1]) + 1
            reference = tokenizer.decode(ids[start:end], skip_special_tokens=True)
            found.append(Question(prompt=ids[:start].tolist(), reference=reference, answer_tokens=end - start))
    return found


@activity.during("generating samples")
def answers(model: Any, tokenizer: Any, asked: Sequence[Question]) -> list[str]:
    """Greedy answers, in order, on every rank; each rank generates its share."""
    me = distributed.ranks()
    longest = max(question.answer_tokens for question in asked)
    own = [question.prompt for question in asked[me.rank :: me.world_size]]
    sharded = shard.is_sharded(model)
    if sharded and len(own) < -(-len(asked) // me.world_size):
        own.append(asked[0].prompt)  # not used: every rank generates as often as the others, which it gathers with
    most = min(longest + SPARE_TOKENS, MOST_NEW_TOKENS)
    parts = distributed.gather_objects(
        generate(model, tokenizer, own, max_new_tokens=most, with_other_ranks=sharded) if own else []
    )
    if sharded:
        shard.reshard(model)
    return [parts[place % me.world_size][place // me.world_size] for place in range(len(asked))]


def texts(tokenizer: Any, asked: Sequence[Question], given: Sequence[str]) -> list[tuple[str, str, str]]:
    """(prompt, the model's answer, right answer) of each question, as text."""
    return [
        (tokenizer.decode(question.prompt, skip_special_tokens=True).strip(), answer, question.reference)
        for question, answer in zip(asked, given, strict=True)
    ]


def table(
    tokenizer: Any, asked: Sequence[Question], before: Sequence[str], after: Sequence[str], count: int = 3
) -> Table:
    """The first few questions with the model's answers before and after training."""
    shown = Table(title="The model's own answers to held-out prompts", title_justify="left", show_lines=True)
    for column in ("prompt", "right answer", "before training", "after training"):
        shown.add_column(column, overflow="fold")
    for (prompt, early, right), late in list(zip(texts(tokenizer, asked, before), after, strict=True))[:count]:
        shown.add_row(*(Text(_shortened(text)) for text in (prompt, right, early, late)))  # Text: nothing is markup
    return shown


def _shortened(text: str) -> str:
    clean = "".join(character if character.isprintable() or character == "\n" else "?" for character in text)
    return clean if len(clean) < 400 else clean[:400] + " ..."
