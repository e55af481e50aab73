"""Ranks that waited for each other too long, by the report that they wrote."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from finetune.review.finding import Finding
from finetune.review.run import Run
from finetune.review.values import count, mapping, number, sequence, text
from finetune.runtime.types import JsonObject
from finetune.text import counted, duration


def check(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """There is a hang report (hang/report.json) and no record of a later step: by definition."""
    if run.hang is None or _went_on(run):
        return None
    missing = [
        one for one in map(mapping, sequence(run.hang.get("missing"))[:64]) if count(one.get("rank")) is not None
    ]
    answered = [mapping(one) for one in sequence(run.hang.get("answered"))[:1024]]
    first = missing[0] if missing else max(answered, key=lambda one: number(one.get("seconds")) or 0.0, default={})
    step = count(first.get("step")) or count(run.hang.get("step"))
    seconds = number(first.get("seconds"))
    where = f"step {'not recorded' if step is None else step}, in {text(first.get('phase')) or 'a phase not recorded'}"
    where += f" for {duration(seconds)}" if seconds is not None else ""
    who, what = _who(missing, first), _what(run.hang, missing)
    collective, waited = text(run.hang.get("collective")), number(run.hang.get("waited_seconds"))
    waits = f" The others waited in {collective}" if collective else ""
    waits += f" for {duration(waited)}" if collective and waited is not None else ""
    ended = run.status != "done"
    return Finding(
        rule="hang",
        level="warning" if ended else "note",
        headline=f"{who} {what}",
        figures=(where, f"{counted(len(answered), 'rank')} answered"),
        evidence=f"{who} {what}: {where}; {counted(len(answered), 'rank')} answered.{waits}{'.' if waits else ''}",
        advice="read hang/report.md and the Python stacks in hang/rank-N.txt; if the rank was only slow, "
        f"training.ddp_timeout: {max(2 * round(max(seconds or 0.0, waited or 0.0)), 600)}",
        gain=f"the steps after step {run.steps or step or 0}" if ended else f"{duration(seconds or 0.0)} per pause",
        lost=1.0 if ended else 0.0,
    )


def _who(missing: list[JsonObject], first: JsonObject) -> str:
    ranks = [count(one.get("rank")) for one in missing]
    if not ranks:
        rank = count(first.get("rank"))
        return "A rank" if rank is None else f"Rank {rank}"
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:4]))}{more}"


def _what(hang: JsonObject, missing: list[JsonObject]) -> str:
    if missing:
        return "kept the others waiting" if all(one.get("answered") is True for one in missing) else "did not answer"
    return "and all others waited for each other" if text(hang.get("collective")) else "was in one phase for long"


def _went_on(run: Run) -> bool:
    """Whether training went on after the report: there are records that are newer."""
    if run.ranks is None or run.hang is None:
        return False
    written = number(run.hang.get("time")) or run.hang_time
    times = run.ranks.times[np.isfinite(run.ranks.times)]
    return written is not None and len(times) > 0 and float(times[-1]) > written
