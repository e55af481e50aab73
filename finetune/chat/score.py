"""Scores answers to rows whose right answers are known: exact match and the user's own metric, with 95 % intervals.

a share of the rows    Wilson's interval
another mean           Student's t
trained - base         of the same rows: Newcombe's intervals for paired shares (1998, method 10), else Student's t
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from finetune.chat.generation import Answer, Generator
from finetune.config import Config
from finetune.config.schema import DataConfig, ModelConfig
from finetune.engine.monitoring import samples
from finetune.engine.monitoring.metrics import exact_match
from finetune.engine.monitoring.samples import Metric, Question
from finetune.errors import RunError, UserError
from finetune.measure.protocol import student_t
from finetune.runtime.command import print_line
from finetune.runtime.types import JsonObject
from finetune.text import counted

Z = statistics.NormalDist().inv_cdf(0.975)
AS_TRAINED = {"format": str, "columns": dict, "chat_template_kwargs": dict, "train_on_thinking": bool}
Interval = tuple[float, float] | None


def questions(generator: Generator, file: Path) -> list[Question]:
    """The rows of a file, read and rendered as in training, each up to its last answer.

    Raises:
        UserError: they cannot be read, or none has an answer to a prompt.
    """
    from finetune.data.prepare import prepare

    given = {name: generator.found.setting(f"data.{name}", kind) for name, kind in AS_TRAINED.items()}
    given = {name: value for name, value in given.items() if value is not None}
    data = DataConfig(train_file=str(file), system_prompt=generator.system, max_length=None, num_proc=1, **given)
    model = ModelConfig(chat_template="none" if generator.template is None else None)
    read = prepare(Config(model=model, data=data), generator.loaded.tokenizer)
    found = samples.questions(read.train, generator.loaded.tokenizer, len(read.train))
    if not found:
        raise UserError(f"--score: no row of {file} has an answer to a prompt. Give rows of questions and answers.")
    if left_out := read.ledgers["train"]["rows_read"] - len(found):
        print_line(f"Left out: {counted(left_out, 'row')} of {file} without an answer to a prompt.", style="yellow")
    stop = generator.stop_string
    return [replace(one, reference=one.reference.partition(stop)[0]) for one in found] if stop else found


def run(asked: Sequence[Question], given: dict[str, list[Answer]], metric: Metric | None) -> JsonObject:
    """Print the scores of the answers, beside the base model's if it answered, and return them by name."""
    right, found = [one.reference for one in asked], {}
    sides = {side: score([one.text for one in answers], right, metric) for side, answers in given.items()}
    for name, (mean, values) in sides["answer"].items():
        found[name] = figures = {"score": mean, "interval": interval(values), "rows": len(right)}
        text = f"{name} {mean:.4g}{_shown(figures['interval'])}"
        if base := sides.get("base", {}).get(name):
            figures |= {"base": base[0], "base_interval": interval(base[1]), "difference": mean - base[0]}
            figures["difference_interval"] = difference(values, base[1])
            text += f", base model {base[0]:.4g}{_shown(figures['base_interval'])}; difference "
            text += f"{figures['difference']:+.4g}{_shown(figures['difference_interval'])}"
        print_line(text)
    print_line(f"On {counted(len(right), 'row')}. In brackets: 95 % intervals, for other rows like these.")
    return found


def score(answers: list[str], right: list[str], metric: Metric | None) -> dict[str, tuple[float, list[float]]]:
    """By name, the score of all answers, and of each alone: none if the score is not their mean."""
    pairs = list(zip(answers, right, strict=True))
    found = {"exact match": (exact_match(answers, right), [exact_match([one], [other]) for one, other in pairs])}
    if metric is None:
        return found
    try:
        rows = [samples.score_on_main(metric, [one], [other]) for one, other in pairs]
    except RunError:  # it may need several answers
        rows = []
    for name, whole in samples.score_on_main(metric, answers, right).items():
        values = [row[name] for row in rows if name in row]
        is_mean = len(values) == len(pairs) and math.isclose(statistics.fmean(values), whole, abs_tol=1e-9)
        found[name] = (whole, values if is_mean else [])
    return found


def interval(values: Sequence[float]) -> Interval:
    """The 95 % interval of a mean; None if it cannot be known."""
    share = values and set(values) <= {0, 1}
    return wilson(statistics.fmean(values), len(values)) if share else student(values)


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of `count` rows."""
    middle, scale = share + Z * Z / (2 * count), 1 + Z * Z / count
    half = Z * math.sqrt(share * (1 - share) / count + (Z / (2 * count)) ** 2)
    return round((middle - half) / scale, 12), round((middle + half) / scale, 12)  # exact at 0 and 1


def student(values: Sequence[float]) -> Interval:
    """Student's 95 % interval of a mean; None if the values do not vary."""
    if len(set(values)) < 2:
        return None
    mean = statistics.fmean(values)
    half = student_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def difference(values: Sequence[float], base: Sequence[float]) -> Interval:
    """The 95 % interval of the mean difference between two scores of the same rows; None if it cannot be known."""
    pairs = list(zip(values, base, strict=False))  # none, if one of them is not a mean
    if not pairs or not set(values) | set(base) <= {0, 1}:
        return student([one - other for one, other in pairs])
    count, p, q = len(pairs), statistics.fmean(values), statistics.fmean(base)
    (low, high), (base_low, base_high) = wilson(p, count), wilson(q, count)
    covariance = sum(one * other for one, other in pairs) / count - p * q
    spread = math.sqrt(p * (1 - p) * q * (1 - q)) or 1.0
    phi = (max(covariance - 1 / (2 * count), 0.0) if covariance > 0 else covariance) / spread

    def apart(one: float, other: float) -> float:
        return math.sqrt(max(one * one - 2 * phi * one * other + other * other, 0.0))

    return p - q - apart(p - low, base_high - q), p - q + apart(high - p, q - base_low)


def _shown(bounds: Interval) -> str:
    return "" if bounds is None else f" [{bounds[0]:.3g}, {bounds[1]:.3g}]"
