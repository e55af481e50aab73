"""Answers a list of prompts, or rows that are scored, several at a time."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table
from rich.text import Text

from finetune.chat import score
from finetune.chat.generation import REMEDY, Answer, Generator
from finetune.engine.model.generation import in_batches
from finetune.engine.monitoring.samples import Metric
from finetune.errors import UserError
from finetune.runtime.command import DONE, console, print_line
from finetune.runtime.files import write_json
from finetune.runtime.types import JsonObject
from finetune.text import counted


def run(generator: Generator, prompts: Sequence[str], batch_size: int, json: Path | None) -> int:
    """Answer the prompts, and print or write the answers in their order. Returns the exit code.

    Raises:
        UserError: a prompt is too long for the model's context; it names the prompt.
    """
    encoded = [generator.encode(generator.opening(prompt)) for prompt in prompts]
    given = answers(generator, "--prompts", encoded, batch_size)
    if json:
        write_json(json, result(generator, prompts, given))
        print_line(f"{counted(len(prompts), 'answer is', 'answers are')} in {json}.")
    else:
        _print(prompts, given)
    if "base" in given:
        same = sum(one.text == other.text for one, other in zip(given["answer"], given["base"], strict=True))
        print_line(f"{same} of {len(prompts)} answers are the same as the base model's.")
    return DONE


def run_scored(generator: Generator, file: Path, metric: Metric | None, batch_size: int, json: Path | None) -> int:
    """Answer the rows of a file, and print or write the scores of the answers. Returns the exit code.

    Raises:
        UserError: the rows cannot be read, or one is too long for the model's context.
        RunError: the metric failed, or returned something else than numbers.
    """
    asked = score.questions(generator, file)
    given = answers(generator, "--score", [one.prompt for one in asked], batch_size)
    scores = score.run(asked, given, metric)
    if json:
        found: JsonObject = result(generator, [one.asked for one in asked], given) | {"scores": scores}
        for row, one in zip(found["answers"], asked, strict=True):
            row["reference"] = one.reference
        write_json(json, found)
    return DONE


def answers(
    generator: Generator, option: str, encoded: Sequence[list[int]], batch_size: int
) -> dict[str, list[Answer]]:
    """Answers to tokenized prompts by side: "answer", and "base" if the base model is loaded.

    Raises:
        UserError: a prompt is too long for the model's context; it names the option and the prompt.
    """
    for number, ids in enumerate(encoded, start=1):
        try:
            generator.answer_limit(ids)
        except UserError as error:
            raise UserError(f"{option}, prompt {number}: {error}") from None
    sides = {"answer": False} | ({"base": True} if generator.loaded.base is not None else {})
    given = {
        name: in_batches(encoded, batch_size, functools.partial(generator.answer, base=base))
        for name, base in sides.items()
    }
    if unfinished := sum(not one.finished for one in given["answer"]):
        limit = counted(generator.settings.max_new_tokens, "token")
        print_line(f"{unfinished} of {len(encoded)} answers were cut at {limit}; {REMEDY}.", style="yellow")
    return given


def result(generator: Generator, prompts: Sequence[str], given: dict[str, list[Answer]]) -> JsonObject:
    """The content of --json."""
    rows = [
        {"prompt": prompt} | {name: asdict(answered[place]) for name, answered in given.items()}
        for place, prompt in enumerate(prompts)
    ]
    return {"run": str(generator.found.given), **generator.facts(), "answers": rows}


def _print(prompts: Sequence[str], given: dict[str, list[Answer]]) -> None:
    shown = Table(show_lines=True, expand=True)
    for column in ("prompt", *(("base", "trained") if "base" in given else ("answer",))):
        shown.add_column(column, overflow="fold", ratio=1)
    for place, prompt in enumerate(prompts):
        texts = [prompt, *(given[name][place].text for name in ("base", "answer") if name in given)]
        shown.add_row(*(Text(text) for text in texts))  # Text: nothing is markup
    console().print(shown)
