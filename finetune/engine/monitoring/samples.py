"""The model's own answers to held-out prompts, next to the right ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from finetune.data import IGNORE_INDEX
from finetune.data.store import Rows
from finetune.data.templates.chat_templates import load_template
from finetune.data.templates.markers import derive_markers
from finetune.engine.model.generation import generate
from finetune.engine.monitoring.metrics import exact_match
from finetune.engine.sharding import shard
from finetune.errors import RunError, UserError
from finetune.runtime import user_code
from finetune.runtime.command import printable
from finetune.runtime.ranks import activity, distributed
from finetune.runtime.types import Model, Tokenizer
from finetune.text import counted

MAX_NEW_TOKENS = 256
CUT = " ... (cut)"  # after an answer that came to no end within its tokens
REPEATED = 3  # times the same: three, as in Welleck et al. 2019, "Neural text generation with unlikelihood training"
REPEATED_CHARACTERS = 20
SPARE_TOKENS = 8  # beyond the longest right answer: room to be wrong in
SCORE_NAME = re.compile(r"[\w .%@-]{1,40}", re.ASCII)  # in a tag of TensorBoard and in a key of logs
RESERVED_NAMES = ("exact_match", "answers", "loss", "perplexity", "token_accuracy", "mean_token_accuracy", "entropy")


@dataclass(frozen=True, kw_only=True)
class Question:
    """A held-out prompt, up to where the assistant speaks for the last time, and what it should say.

    asked:  the last message of the user in the prompt, as text; the whole prompt if it has no turns
    """

    prompt: list[int]
    asked: str
    reference: str
    answer_tokens: int
    end: int | None  # the special token that ends the answer, if one does


def questions(rows: Rows, tokenizer: Tokenizer, count: int) -> list[Question]:
    """The first `count` rows that end in a supervised answer to a prompt; fully supervised rows have no prompt."""
    found: list[Question] = []
    special = set(tokenizer.added_tokens_decoder)
    markers = _markers(tokenizer)
    for index in range(len(rows)):
        if len(found) == count:
            break
        ids, labels = rows[index]
        supervised = np.flatnonzero(labels != IGNORE_INDEX)
        breaks = np.flatnonzero(np.diff(supervised) > 1)
        start = int(supervised[breaks[-1] + 1] if len(breaks) else supervised[0])
        if start > 1:
            end = int(supervised[-1]) + 1
            reference = tokenizer.decode(ids[start:end].tolist(), skip_special_tokens=True)
            last = int(ids[end - 1])
            found.append(
                Question(
                    prompt=ids[:start].tolist(),
                    asked=_last_message(tokenizer, ids[:start].tolist(), markers),
                    reference=reference,
                    answer_tokens=end - start,
                    end=last if last in special else None,
                )
            )
    return found


def _markers(tokenizer: Tokenizer) -> tuple[str, str] | None:
    """What starts a user's and an assistant's turn in the chat template; None if it is not known."""
    try:
        user, assistant = derive_markers(tokenizer, load_template(tokenizer))
    except (UserError, AttributeError):
        return None
    return (user.strip(), assistant.strip()) if user.strip() and assistant.strip() else None


def _last_message(tokenizer: Tokenizer, prompt: list[int], markers: tuple[str, str] | None) -> str:
    """The last message of the user in a prompt that the chat template rendered; else the whole prompt. A template may
    begin every prompt with a system message of its own."""
    if markers is not None:
        text = tokenizer.decode(prompt, skip_special_tokens=False)
        _, turn, rest = text.rpartition(markers[0])
        if turn:
            message, answered, _ = rest.rpartition(markers[1])
            message = message if answered else rest
            for token in tokenizer.added_tokens_decoder.values():
                if token.special:
                    message = message.replace(token.content, "")
            return message.strip()
    return tokenizer.decode(prompt, skip_special_tokens=True).strip()


@activity.during("generating samples")
def answers(model: Model, tokenizer: Tokenizer, asked: Sequence[Question]) -> list[tuple[str, bool]]:
    """Greedy answers, in order, on every rank, and whether each came to an end; each rank generates its share."""
    me = distributed.ranks()
    longest = max(question.answer_tokens for question in asked)
    own = [question.prompt for question in asked[me.rank :: me.world_size]]
    sharded = shard.is_sharded(model)
    if sharded and len(own) < -(-len(asked) // me.world_size):
        own.append(asked[0].prompt)  # not used: every rank generates as often as the others, which it gathers with
    most = min(longest + SPARE_TOKENS, MAX_NEW_TOKENS)
    stops = {question.end for question in asked if question.end is not None}
    parts = distributed.gather_objects(
        generate(model, tokenizer, own, max_new_tokens=most, stops=stops, with_other_ranks=sharded) if own else []
    )
    if sharded:
        shard.reshard(model)
    return [parts[place % me.world_size][place // me.world_size] for place in range(len(asked))]


@dataclass(frozen=True, kw_only=True)
class SampleResult:
    """Answers and what they are worth.

    answers:  in the order of the questions
    shown:    (question, answer, reference) of each, as text; the answer with a mark if it was cut
    scores:   by name: "exact_match", then those of the user's metric
    """

    answers: list[str]
    shown: list[tuple[str, str, str]]
    scores: dict[str, float]

    @property
    def broken(self) -> float:
        """Share (0 to 1) of the answers that are empty or end in a repetition, though the right one is not."""
        return sum(
            is_broken(text) and not is_broken(right) for text, (*_, right) in zip(self.answers, self.shown, strict=True)
        ) / len(self.answers)

    @property
    def words(self) -> str:
        """The scores as a sentence that says how many answers they are of."""
        labels = {"exact_match": "exact match"}
        named = [f"{labels.get(name, name)} {value:.4g}" for name, value in self.scores.items()]
        return f"{', '.join(named)} ({counted(len(self.answers), 'answer')})"


def is_broken(text: str) -> bool:
    """Whether a text has no letter or digit, or at least half of it, and REPEATED_CHARACTERS, are an ending that is the
    same piece three times or more."""
    text = " ".join(text.split())
    if not any(one.isalnum() for one in text):
        return True
    least = max(REPEATED_CHARACTERS, len(text) // 2)
    for size in range(1, len(text) // REPEATED + 1):
        pieces = max(-(-least // size), REPEATED)
        if pieces * size <= len(text) and text.endswith(text[len(text) - size :] * pieces):
            return True
    return False


@dataclass(frozen=True, kw_only=True)
class Metric:
    """The function that logging.metric, or the option `key`, names."""

    name: str
    function: Callable[[list[str], list[str]], object]
    key: str = "logging.metric"


def answer_and_score(
    model: Model, tokenizer: Tokenizer, asked: Sequence[Question], metric: Metric | None = None
) -> SampleResult:
    """Have the model answer, and score the answers. Every rank calls it, and gets the same.

    Raises:
        RunError: on every rank: the metric failed, or returned something else than numbers.
    """
    generated = answers(model, tokenizer, asked)
    given = [text for text, _ in generated]
    references = [question.reference for question in asked]
    scores = {"exact_match": exact_match(given, references)}
    if metric is not None:
        scores |= score_on_main(metric, given, references)
    shown = [
        (question.asked, text if ended else text + CUT, question.reference)
        for question, (text, ended) in zip(asked, generated, strict=True)
    ]
    return SampleResult(answers=given, shown=shown, scores=scores)


@activity.during("running logging.metric")
def score_on_main(metric: Metric, given: list[str], references: list[str]) -> dict[str, float]:
    """The user's scores, computed on rank 0 alone: a metric may start processes or keep counts."""
    found: dict[str, float] | str = {}
    if distributed.ranks().is_main:
        try:
            with user_code.user_errors(metric.key, metric.name):
                found = _checked_scores(metric, metric.function(list(given), list(references)))
        except RunError as error:
            found = str(error)
    found = distributed.gather_objects(found)[0]
    if isinstance(found, str):
        raise RunError(found)
    return found


def _checked_scores(metric: Metric, value: Any) -> dict[str, float]:
    """What a metric returned, by name: a number has the name of the function."""
    if not isinstance(value, Mapping):
        value = {metric.name.rpartition(":")[2]: value}
    for name, number in value.items():
        if not isinstance(name, str) or not SCORE_NAME.fullmatch(name) or name in RESERVED_NAMES:
            raise RunError(
                f"{metric.key}: {metric.name} returned a value named {name!r}. Names are letters, digits, spaces and"
                f" _ . - % @, at most 40, and none of {', '.join(RESERVED_NAMES)}."
            )
        if isinstance(number, str) or not hasattr(number, "__float__"):
            raise RunError(
                f"{metric.key}: {metric.name} returned a {type(number).__name__} as {name}. Return a number, or a "
                "dict of numbers."
            )
    return {name: float(number) for name, number in value.items()}


def table(before: SampleResult, after: SampleResult, count: int = 3) -> Table:
    """The first few questions with the model's answers before and after training."""
    shown = Table(title="The model's own answers to held-out prompts", title_justify="left", show_lines=True)
    for column in ("prompt", "right answer", "before training", "after training"):
        shown.add_column(column, overflow="fold")
    for (prompt, early, right), (_, late, _) in list(zip(before.shown, after.shown, strict=True))[:count]:
        texts = map(printable, (prompt, right, early, late))
        shown.add_row(*(Text(one if len(one) < 400 else one[:400] + " ...") for one in texts))  # Text: no markup
    return shown
