"""A rank that did not answer, by the report that the others wrote."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from finetune.review.finding import Finding, duration
from finetune.review.run import Run
from finetune.review.values import count, mapping, number, sequence, text


def check(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """There is a hang report of the last start: a rank was missing in a collective, or in one phase for too long."""
    if run.hang is None or _is_older(run):
        return None
    missing = [mapping(one) for one in sequence(run.hang.get("missing"))[:64]]
    names = [f"rank {count(one.get('rank'))}" for one in missing if count(one.get("rank")) is not None]
    one = missing[0] if missing else {}
    step = count(one.get("step")) or count(run.hang.get("step"))
    phase, seconds = text(one.get("phase")) or "an unrecorded phase", number(one.get("seconds"))
    who = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") or "a rank"
    since = f" for {duration(seconds)}" if seconds is not None else ""
    collective = text(run.hang.get("collective"))
    answered = len(sequence(run.hang.get("answered")))
    ended = run.status != "done"
    return Finding(
        rule="hang",
        level="warning" if ended else "note",
        headline=f"{who} did not answer".replace("rank", "Rank", 1).replace("a Rank", "A rank"),
        figures=(
            f"step {step if step is not None else 'not recorded'}, in {phase}{since}",
            f"{answered} ranks answered",
        ),
        evidence=f"{who}: no answer at step {step if step is not None else 'not recorded'}, in {phase}{since}; "
        f"{answered} ranks answered" + (f", waiting in {collective}" if collective else "") + ".",
        advice="read hang/report.md and hang/rank-N.txt, the Python stacks of the ranks; training.ddp_timeout: "
        "2 x the longest phase, if it was only slow",
        gain=f"the whole run: it ended at step {run.steps or step or 0}"
        if ended
        else f"{since.strip() or 'a pause'} per pause",
        lost=1.0 if ended else 0.0,
        charts=(),
    )


def _is_older(run: Run) -> bool:
    """Whether training went on after the report: records are newer."""
    if run.ranks is None or run.hang_time is None:
        return False
    times = run.ranks.times[np.isfinite(run.ranks.times)]
    return len(times) > 0 and float(times[-1]) > run.hang_time and run.status in ("done", "interrupted")
