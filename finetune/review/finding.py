"""What a rule returns, and how its numbers are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from finetune.review.run import Run
from finetune.runtime.types import JsonObject

Level = Literal["warning", "note"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that limits or endangers a run.

    Attributes:
        headline: what it is, as a clause that begins a sentence.
        figures: the two numbers behind it.
        evidence: where, how much, against which threshold.
        advice: a configuration line or a command.
        gain: what that should bring.
        lost: share (0 to 1) of the run's time that it costs; 0 if it costs something other than time.
        confidence: high, medium or low.
        charts: names of the metrics that show it.
    """

    rule: str
    level: Level = "warning"
    headline: str
    figures: tuple[str, str]
    evidence: str
    advice: str
    gain: str
    lost: float = 0.0
    confidence: str = "high"
    charts: tuple[str, ...] = ()

    def to_dict(self) -> JsonObject:
        """As JSON."""
        names = ("rule", "level", "headline", "evidence", "advice", "gain", "confidence")
        share = min(max(self.lost, 0.0), 1.0) if math.isfinite(self.lost) else 0.0
        return {name: getattr(self, name) for name in names} | {"figures": list(self.figures), "lost": share}


Rule = Callable[[Run, Sequence[Run]], Finding | None]


@dataclass(frozen=True)
class Explanation:
    """A rule for a reader who meets it for the first time, in Markdown without markup but `code`.

    Attributes:
        question: what the rule answers, in the reader's words.
        parts: heading -> text, in the order in which they are read.
    """

    question: str
    parts: dict[str, str]


def confidence(value: float, threshold: float, samples: int) -> str:
    """How sure a finding is: by its distance from the threshold and by the number of samples behind it."""
    if samples < 3:
        return "low"
    return "high" if value >= 1.5 * threshold and samples >= 5 else "medium"


def micro_batch(size: float, now: float) -> str:
    """The setting that makes a micro-batch larger or smaller, with the present value."""
    return f"training.per_device_train_batch_size: {size:.0f} (now {now:.0f})"


def percent(share: float) -> str:
    """0.123 -> 12 %; one digit more below 10 %."""
    return f"{share:.1%}".replace("%", " %") if abs(share) < 0.0995 else f"{share:.0%}".replace("%", " %")


def clock(seconds: float) -> str:
    """Minutes and seconds, or hours: 0:53, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float) -> str:
    """Three or four digits, thousands separated."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def steps(numbers: Sequence[int], most: int = 5) -> str:
    """`step 3`, or `steps 3, 8, 9 and 4 more`."""
    shown = ", ".join(map(str, numbers[:most]))
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return f"step{'s' if len(numbers) > 1 else ''} {shown}{more}"
