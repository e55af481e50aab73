"""The verdict on a run: its findings in order, and one sentence about what limits it."""

from __future__ import annotations

from collections.abc import Sequence

from finetune.review.finding import Finding, percent
from finetune.review.rules import RULES, timing
from finetune.review.run import Run

# What makes a run worthless comes before what makes it slow, whatever its cost in time.
FIRST = ("hang", "not-finite", "diverging", "frozen", "leak")


def findings(run: Run, others: Sequence[Run] = ()) -> list[Finding]:
    """What the rules found: warnings before notes; what spoils the result first, then by the time lost."""
    found = [one for rule in RULES.values() if (one := rule(run, others)) is not None]
    order = {name: place for place, name in enumerate(FIRST)}
    return sorted(found, key=lambda one: (one.level != "warning", order.get(one.rule, len(FIRST)), -one.lost))


def verdict(run: Run, found: Sequence[Finding]) -> tuple[str, str]:
    """(sentence, confidence): what limits the run with the two numbers behind it, or that nothing limits it."""
    known = [one for one in found if one.level == "warning"] or list(found)
    if known:
        first = known[0]
        return f"{first.headline}: {first.figures[0]}, {first.figures[1]}.", first.confidence
    if run.status == "failed":
        why = run.text("error")
        return f"The run failed{': ' + why.rstrip('.') if why else ''}. No rule found a cause.", "low"
    measured = _measured(run)
    if not measured:
        return "Nothing that is recorded limits the run.", "low"
    confidence = "high" if timing.records_of(run) >= 5 and len(measured) > 1 else "medium"
    return f"Nothing limits the run: {', '.join(measured[:2])}.", confidence


def _measured(run: Run) -> list[str]:
    """The figures that would show a limit, most important first."""
    shares = {
        "exposed communication": timing.exposed_communication(run),
        "data wait": timing.data_wait(run),
        "padding": run.typical("padding"),
    }
    found = [f"{name} {percent(share)}" for name, share in shares.items() if share is not None]
    mfu = run.typical("mfu")
    return ([f"MFU {percent(mfu)}"] if mfu is not None else []) + found
