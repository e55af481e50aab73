"""From predictions of several world sizes to one decision, each with its reason in a sentence. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from finetune.measure.predict import Curve, Gradients, Prediction, Run, Work, predict
from finetune.measure.rules import EFFICIENCY_TO_JUSTIFY, MEMORY_MARGIN

LEAST_GAIN = 1.03  # of tokens/s, below which a change of settings is not told from noise


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What one device takes for its share of the work at some world size.

    per_device:       rows of a micro-batch
    steps:            optimizer steps of the run
    start_up_seconds: of one device
    memory_bytes:     of a device; None where it has no limit of its own
    """

    work: Work
    gradients: Gradients
    per_device: int
    steps: float
    start_up_seconds: float
    memory_bytes: float | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number of devices.

    source:     where its all-reduce comes from; None where it has none
    here:       whether this machine has so many devices
    prediction: None where it cannot be predicted; `reason` says why
    """

    world_size: int
    here: bool
    source: str | None
    reason: str
    per_device: int | None = None
    prediction: Prediction | None = None
    run: Run | None = None
    efficiency: float | None = None
    fits: bool | None = None  # None: the device's memory is not known
    cost: float | None = None
    break_even_steps: float | None = None
    price_of_an_hour_saved: float | None = None

    @property
    def eligible(self) -> bool:
        """Whether it can be launched here."""
        return self.here and self.prediction is not None and self.fits is not False

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with the derived figures."""
        own = {name: value for name, value in vars(self).items() if name not in ("prediction", "run")}
        if self.prediction is None or self.run is None:
            return own
        return own | {
            **vars(self.prediction),
            "tokens_per_second_per_gpu": self.prediction.tokens_per_second_per_gpu,
            "exposed_fraction": self.prediction.exposed_fraction,
            "steps": self.run.steps,
            "start_up_seconds": self.run.start_up_seconds,
            "hours": self.run.hours,
        }


def rows(
    candidates: Mapping[int, Candidate | str],
    curves: Mapping[int, tuple[Curve | None, str]],
    *,
    here: int,
    extra_start_up_seconds: float = 0.0,
    price_per_gpu_hour: float | None = None,
) -> list[Row]:
    """One row for each world size of `candidates`; 1 is among them, and measured.

    Args:
        candidates: by world size; or why there is none.
        curves: by world size above 1, its all-reduce and where that comes from; or None and why.
        here: devices of this machine.
        extra_start_up_seconds: that several ranks need to meet, over one.
        price_per_gpu_hour: zero and above; None where it is not given.
    """
    first = candidates[1]
    if isinstance(first, str):
        raise ValueError(f"one device was not measured: {first}")
    one = _row(1, first, None, None, here, first.start_up_seconds, price_per_gpu_hour)
    found = [one]
    for world in sorted(set(candidates) - {1}):
        candidate = candidates[world]
        curve, source = curves.get(world, (None, "its all-reduce was not measured"))
        if isinstance(candidate, str) or curve is None:
            reason = candidate if isinstance(candidate, str) else source
            found.append(Row(world_size=world, here=world <= here, source=None, reason=reason))
            continue
        start_up = first.start_up_seconds + extra_start_up_seconds
        row = _row(world, candidate, curve, source, here, start_up, price_per_gpu_hour)
        found.append(_against(one, row, candidate, price_per_gpu_hour))
    return found


def _row(
    world: int,
    candidate: Candidate,
    curve: Curve | None,
    source: str | None,
    here: int,
    start_up_seconds: float,
    price: float | None,
) -> Row:
    prediction = predict(candidate.work, candidate.gradients, world, curve)
    run = Run(
        world_size=world,
        step_seconds=prediction.step_seconds,
        steps=candidate.steps,
        start_up_seconds=start_up_seconds,
    )
    memory = candidate.memory_bytes
    return Row(
        world_size=world,
        here=world <= max(here, 1),
        source=source,
        reason="measured",
        per_device=candidate.per_device,
        prediction=prediction,
        run=run,
        efficiency=1.0,
        # One device was tried, which says more than a margin.
        fits=None if memory is None else (world == 1 or prediction.peak_memory_bytes <= MEMORY_MARGIN * memory),
        cost=None if price is None else run.cost(price),
    )


def _against(one: Row, row: Row, candidate: Candidate, price: float | None) -> Row:
    """With what it is worth against one device."""
    assert one.prediction and one.run and row.prediction and row.run
    row = replace(
        row,
        efficiency=row.prediction.efficiency(one.prediction),
        break_even_steps=row.run.break_even_steps(one.run),
        price_of_an_hour_saved=None if price is None else row.run.price_of_an_hour_saved(one.run, price),
    )
    return replace(row, reason=_reason(row, one, candidate))


def _reason(row: Row, one: Row, candidate: Candidate) -> str:
    assert row.prediction and row.run and one.prediction and one.run and row.efficiency is not None
    world, efficiency = row.world_size, row.efficiency
    faster = row.prediction.tokens_per_second / one.prediction.tokens_per_second
    lost = f"{row.prediction.exposed_fraction:.0%} of a step is waiting for communication"
    if row.fits is False:
        need = row.prediction.peak_memory_bytes / 2**30
        return f"needs {need:.1f} GiB of a GPU's {(candidate.memory_bytes or 0) / 2**30:.1f}, above the margin of 0.8"
    if faster <= 1:
        return f"{world} are slower than one ({faster:.2f} times): {lost}"
    if row.run.hours >= one.run.hours:
        return (
            f"this run ends before {world} have gained what they take longer to start; they pay from "
            f"{row.break_even_steps or 0:,.0f} steps on"
        )
    if efficiency < EFFICIENCY_TO_JUSTIFY:
        return f"{faster:.2f} times as fast with {world} devices, {efficiency:.0%} efficiency, is below 70 %: {lost}"
    return f"{faster:.2f} times as fast, {efficiency:.0%} efficiency; {lost}"


def choose(found: Sequence[Row], *, fastest: bool = False) -> Row | None:
    """The world size to launch here: the one that ends first, of those with an efficiency of at least 70 % (or of all,
    with `fastest`). One device is always among the candidates; None where not even that can be launched."""
    candidates = [
        row
        for row in found
        if row.eligible and (row.world_size == 1 or fastest or (row.efficiency or 0.0) >= EFFICIENCY_TO_JUSTIFY)
    ]
    return min(candidates, key=lambda row: (row.run.hours if row.run else 0.0, row.world_size), default=None)


def in_a_sentence(chosen: Row, found: Sequence[Row]) -> str:
    """Why this number and no other."""
    if chosen.world_size > 1:
        return f"{chosen.world_size} devices: {chosen.reason}"
    others = [row for row in found if row.world_size > 1 and row.here]
    if not others:
        return "one device: there is no second one here"
    nearest = max(others, key=lambda row: row.efficiency or 0.0)
    return f"one device: with {nearest.world_size}, {nearest.reason}"
