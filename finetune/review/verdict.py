"""The verdict on a run: its findings in order, and a sentence for each half: whether it learns, and what limits its
speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from finetune.review.finding import Finding, number, percent
from finetune.review.rules import LEARNING, RULES, curve, learning, speed, timing
from finetune.review.run import Run
from finetune.text import counted

# What makes a run worthless comes before what makes it slow, whatever its cost in time.
FIRST = ("hang", "not-finite", "diverging", "frozen", "answers", "leak")
FEWEST_STEPS = 5  # the first of a run compiles and allocates
SHARED = 0.1  # of the records that have samples of the GPUs
BY_TURNS = 0.05  # of a step, that ranks wait for the slowest, although none is slow throughout
LOW_MFU = 0.15  # records: 0.4 to 0.7 for 1.2 B and 8 B on H100s; 0.2 with CUDA graphs for SmolLM2, 0.07 without


@dataclass(frozen=True)
class Half:
    """One half of a verdict.

    Attributes:
        name: Learning or Speed.
        level: "unknown" if too little is recorded to judge.
    """

    name: str
    sentence: str
    level: Literal["warning", "note", "good", "unknown"]
    confidence: str = "high"

    def __str__(self) -> str:
        return f"{self.name}: {self.sentence}"


def findings(run: Run, others: Sequence[Run] = ()) -> list[Finding]:
    """What the rules found: warnings before notes; what spoils the result first, then by the time lost."""
    found = [one for rule in RULES.values() if (one := rule(run, others)) is not None]
    order = {name: place for place, name in enumerate(FIRST)}
    return sorted(found, key=lambda one: (one.level != "warning", order.get(one.rule, len(FIRST)), -one.lost))


def verdict(run: Run, found: Sequence[Finding]) -> tuple[Half, Half]:
    """Whether the run learns, and what limits its speed: the most severe finding of each half with the two numbers
    behind it, or what shows that there is none."""
    mine = [one for one in found if one.rule in LEARNING]
    other = [one for one in found if one.rule not in LEARNING]
    learns = _severest("Learning", mine) or _failed(run, found) or _learned(run)
    speed = _severest("Speed", other) or _unlimited(run)
    if shared := _shared(run):
        speed = replace(speed, sentence=f"{speed.sentence} {shared}")
    return learns, speed


def _shared(run: Run) -> str:
    """That other processes computed on the run's GPUs, which its figures do not tell apart."""
    others = run.ranks.column("gpu_other_processes") if run.ranks is not None else np.zeros((0, 0))
    known = others[np.isfinite(others).any(axis=1)]
    share = float((known > 0).any(axis=1).mean()) if len(known) else 0.0
    return f"Other processes used its GPUs in {percent(share)} of the samples." if share >= SHARED else ""


def _severest(name: str, found: Sequence[Finding]) -> Half | None:
    if not found:
        return None
    first = found[0]
    return Half(name, f"{first.headline}: {first.figures[0]}, {first.figures[1]}.", first.level, first.confidence)


def _failed(run: Run, found: Sequence[Finding]) -> Half | None:
    if run.status != "failed" or any(one.level == "warning" for one in found):
        return None
    why = run.text("error")
    text = f"the run failed{': ' + why.rstrip('.') if why else ''}. No rule found a cause."
    return Half("Learning", text, "warning", "low")


def _learned(run: Run) -> Half:
    """Good if the held-out loss has fallen; of a short run beyond doubt. The training loss alone does not show it."""
    series, losses = next(iter(learning.held_out(run).values()), None), learning.losses(run).values
    few = f"{counted(len(losses), 'logged loss', 'logged losses')}, too few to judge (at least {learning.FEWEST})"
    short = len(losses) < learning.FEWEST
    if series is not None and len(series) > 1:
        first, last = float(series.values[0]), float(series.values[-1])
        since = f" since step {series.steps[0]}" if series.steps[0] else ""
        text = f"held-out loss {number(first)} -> {number(last)}{since}"
        if first < learning.KNOWN or (learning.is_above_held_out(first, last) if short else last < first):
            return Half("Learning", f"{text}.", "good")
        return Half("Learning", f"{text}; {few if short else 'it did not fall'}.", "unknown", "low")
    missing = "no held-out rows" if series is None else "no second held-out loss"
    if short:
        return Half("Learning", f"{few}, and {missing}.", "unknown", "low")
    first, last = curve.level(losses, 0, 0.1), curve.level(losses, 0.9, 1)
    text = f"training loss {number(first)} -> {number(last)}"
    if first - last > 2 * curve.error_of_difference(losses, 0.1):
        return Half("Learning", f"{text}; {missing} to check it on.", "unknown", "medium")
    return Half("Learning", f"{text}, which is within its noise; {missing}.", "unknown", "low")


def _unlimited(run: Run) -> Half:
    """Nothing limits the speed, by the figures that would show a limit, most important first."""
    shares = {
        "MFU": run.typical("mfu"),
        "exposed communication": timing.exposed_communication(run),
        "data wait": timing.data_wait(run),
        "padding": run.typical("padding"),
    }
    shown = [f"{name} {percent(share)}" for name, share in shares.items() if share is not None]
    if not shown or run.step_seconds is None:
        return Half("Speed", "no step times are recorded.", "unknown", "low")
    if run.steps is not None and run.steps < FEWEST_STEPS:
        return Half(
            "Speed", f"{counted(run.steps, 'step')}, too few to judge (at least {FEWEST_STEPS}).", "unknown", "low"
        )
    if (mfu := shares["MFU"]) is not None and mfu < LOW_MFU:
        without = f" (CUDA graphs: {why})" if (why := speed.without_graphs(run)) else ""
        text = f"MFU is {percent(mfu)}, and no rule says why: kernels may be short, or launched too slowly{without}."
        if run.at("cuda_graphs.used") is True:
            text = f"MFU is {percent(mfu)}: kernels are short. Give each pass more rows, or use fewer GPUs."
        if (waiting := run.typical("lost_to_slowest") or 0.0) >= BY_TURNS:
            text += f" Waiting for whichever rank is slowest costs {percent(waiting)} of the time."
        return Half("Speed", text, "unknown", "low")
    confidence = "high" if timing.records_of(run) >= 5 and len(shown) > 1 else "medium"
    return Half("Speed", f"nothing limits it: {', '.join(shown[:2])}.", "good", confidence)
