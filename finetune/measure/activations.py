"""How activations are kept, what each way needs and takes, and the longest row that fits with it. Pure arithmetic.

Memory is a line over the tokens of a micro-batch: what is held anyway, and activations, which grow with the tokens
(variable-length attention keeps nothing of [tokens, tokens]). So two lengths give the line of a mode, or one and what
is held. Time has a part that grows with the tokens and one, attention, that grows with the squared lengths of
documents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from finetune.config.rules import Mode
from finetune.measure import held
from finetune.runtime.types import JsonObject

NOISE = 0.02  # two modes whose speed differs by less are equally fast
RANKS = (2, 4, 8)  # numbers of GPUs that are named for context parallelism


@dataclass(frozen=True, kw_only=True)
class Point:
    """Passes on one document of so many tokens: peak memory, the seconds of a forward and backward pass, and those of
    the first pass, which compiles."""

    tokens: int
    peak_bytes: float
    seconds: float
    first_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Line:
    """Peak memory by tokens of a micro-batch."""

    fixed_bytes: float
    bytes_per_token: float

    def peak_bytes(self, tokens: float) -> float:
        return self.fixed_bytes + self.bytes_per_token * tokens

    def longest(self, limit_bytes: float) -> int | None:
        """Tokens that fit; None if memory does not grow with them."""
        if self.bytes_per_token <= 0:
            return None
        return max(int((limit_bytes - self.fixed_bytes) / self.bytes_per_token), 0)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A mode, measured.

    held_bytes:  before the passes: weights, and whatever else stays
    points:      by length, at most two; none if memory ran out at the shortest
    square_cost: computation of a squared token of a document's length, attention, over that of a token elsewhere
    host_tokens: of a micro-batch whose activations the host has memory for; None if it keeps none
    """

    mode: Mode
    held_bytes: float
    points: tuple[Point, ...]
    square_cost: float
    host_tokens: int | None = None

    @classmethod
    def from_dict(cls, content: JsonObject) -> Measured:
        """The inverse of `asdict`. Raises TypeError or KeyError for the file of another version."""
        return cls(
            mode=Mode(**content["mode"]),
            held_bytes=float(content["held_bytes"]),
            points=tuple(Point(**one) for one in content["points"]),
            square_cost=float(content["square_cost"]),
            host_tokens=content["host_tokens"],
        )

    @property
    def line(self) -> Line | None:
        """Through the two points, or through what is held and one point, which is never too low; None without any. With
        tiled MLPs through the longer one: the peak of a short row is in its MLP, which is one tile, and that of a long
        one is not, so the points are on different lines."""
        if not self.points:
            return None
        first, last = self.points[0], self.points[-1]
        both = len(self.points) > 1 and not self.mode.tiled_mlp
        tokens, peak = (first.tokens, first.peak_bytes) if both else (0, self.held_bytes)
        slope = max((last.peak_bytes - peak) / (last.tokens - tokens), 0.0)
        return Line(fixed_bytes=last.peak_bytes - slope * last.tokens, bytes_per_token=slope)

    def longest(self, limit_bytes: float) -> int | None:
        """Tokens of the longest row that fits, one row a micro-batch; None if memory does not grow with them."""
        if self.line is None:
            return 0
        found = [one for one in (self.line.longest(limit_bytes), self.host_tokens) if one is not None]
        return min(found, default=None)

    def fits(self, tokens: float, limit_bytes: float, *, margin: bool = True) -> bool:
        """Whether a micro-batch of so many tokens fits; the limit and the margin are those of `held.fits`."""
        if self.line is None or not held.fits(self.line.peak_bytes(tokens), limit_bytes, margin=margin):
            return False
        return self.host_tokens is None or tokens <= self.host_tokens

    def ranks(self, tokens: int, limit_bytes: float) -> int | None:
        """Ranks that hold a micro-batch of so many tokens together, if each has as many tokens of its rows (context
        parallelism); None if RANKS are not enough. What the host keeps is not divided."""
        if self.line is None or (self.host_tokens is not None and tokens > self.host_tokens):
            return None
        each = ((ranks, self.line.peak_bytes(tokens / ranks)) for ranks in RANKS)
        return next((ranks for ranks, peak in each if held.fits(peak, limit_bytes)), None)

    def tokens_per_second(self, tokens: float, squared_lengths: float) -> float:
        """Predicted throughput of passes on documents of so many tokens in all, from the seconds of the longest
        measured one: of a short one, a GPU waits for the host.

        Args:
            squared_lengths: sum of their squared lengths.
        """
        last = self.points[-1]
        work = tokens + self.square_cost * squared_lengths
        seconds = last.seconds * work / (last.tokens + self.square_cost * last.tokens**2)
        return tokens / seconds if seconds > 0 else math.inf


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What of a job's rows decides memory and speed.

    most:            tokens of the largest micro-batch, padding included
    tokens, squares: of all rows: tokens, and the sum of squared document lengths
    shared_by:       ranks that share each row (context parallelism)
    """

    most: int
    tokens: int
    squares: int
    shared_by: int = 1


def fastest(found: Sequence[Measured], rows: Rows, limit_bytes: float) -> Measured | None:
    """The mode that is fastest on these rows among those that hold the largest micro-batch; of equally fast ones the
    first, which does the least. None if none holds it."""
    fitting = [one for one in found if one.fits(rows.most, limit_bytes)]
    speeds = [one.tokens_per_second(rows.tokens, rows.squares) for one in fitting]
    enough = (1 - NOISE) * max(speeds, default=0.0)
    return next((one for one, speed in zip(fitting, speeds, strict=True) if speed >= enough), None)


def most_frugal(found: Sequence[Measured], limit_bytes: float) -> Measured | None:
    """The mode with the longest row; None if nothing was measured."""

    def longest(one: Measured) -> float:
        tokens = one.longest(limit_bytes)
        return math.inf if tokens is None else tokens

    return max((one for one in found if one.line is not None), key=longest, default=None)


def remedy(found: Sequence[Measured], rows: Rows, limit_bytes: float) -> str | None:
    """The settings that hold the largest micro-batch, or the number of GPUs that hold it together; None if neither is
    known to."""
    if (chosen := fastest(found, rows, limit_bytes)) is not None:
        return chosen.mode.text
    fewest = [(ranks, one) for one in found if (ranks := one.ranks(rows.most, limit_bytes)) is not None]
    if not fewest:
        return None
    ranks, one = min(fewest, key=lambda pair: pair[0])
    ranks *= rows.shared_by
    return f"{one.mode.text}, with training.context_parallel: {ranks} on {ranks} GPUs"


def to_dict(found: Sequence[Measured], rows: Rows, limit_bytes: float) -> JsonObject:
    """The measured modes for reports and run.json."""
    return {
        "limit_gib": limit_bytes / 2**30,
        "margin": held.MEMORY_MARGIN,
        "rows": asdict(rows),
        "modes": [_entry(one, rows, limit_bytes) for one in found],
    }


def _entry(one: Measured, rows: Rows, limit_bytes: float) -> JsonObject:
    line = one.line
    content: JsonObject = asdict(one) | {"fits": False, "longest_row_tokens": 0, "tokens_per_second": None}
    if line is None:
        return content
    return content | {
        **asdict(line),
        "longest_row_tokens": one.longest(limit_bytes),
        "predicted_peak_bytes": line.peak_bytes(rows.most),
        "fits": one.fits(rows.most, limit_bytes),
        "tokens_per_second": one.points[0].tokens / one.points[0].seconds,
        "predicted_tokens_per_second": one.tokens_per_second(rows.tokens, rows.squares),
    }
