"""Choose a world size from predictions, with a reason for each in one sentence. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from finetune.measure import held
from finetune.measure.predict import Curve, Prediction, Work, predict
from finetune.runtime.types import JsonObject
from finetune.text import counted

EFFICIENCY_TO_JUSTIFY = 0.7  # below this, a second GPU is not worth it


@dataclass(frozen=True, kw_only=True)
class Row:
    """One world size.

    here:       whether this machine has that many devices
    source:     of its all-reduce; None if it has none
    reason:     why it is or is not worth it, or why there is no prediction
    prediction: None if it cannot be predicted
    """

    world_size: int
    here: bool
    source: str | None
    reason: str
    per_device: int | None = None
    prediction: Prediction | None = None
    efficiency: float | None = None
    fits: bool | None = None  # None: the device's memory is unknown
    cost: float | None = None
    break_even_steps: float | None = None

    @property
    def eligible(self) -> bool:
        """Whether it can be launched here."""
        return self.here and self.prediction is not None and self.fits is not False

    def to_dict(self) -> JsonObject:
        """The row as JSON, with the derived figures."""
        own = {name: value for name, value in vars(self).items() if name != "prediction"}
        if self.prediction is None:
            return own
        return own | {
            **vars(self.prediction),
            "tokens_per_second_per_gpu": self.prediction.tokens_per_second_per_gpu,
            "exposed_fraction": self.prediction.exposed_fraction,
            "hours": self.prediction.hours,
        }


def rows(
    by_world_size: Mapping[int, Work | str],
    curves: Mapping[int, tuple[Curve | None, str]],
    *,
    here: int,
    extra_start_up_seconds: float = 0.0,
    price_per_gpu_hour: float | None = None,
    fewest: int = 1,
    predicts: Callable[[Work, int, Curve | None], Prediction] = predict,
    measured: bool = True,
) -> list[Row]:
    """One row per world size of `by_world_size`, that of `fewest` first.

    Args:
        by_world_size: one rank's share of the run, or the reason why it could not be measured.
        curves: by world size above 1, its all-reduce and the source of it; or None and the reason.
        here: devices of this machine.
        extra_start_up_seconds: time that several ranks need to connect, on top of the start-up of one.
        price_per_gpu_hour: at least zero; None to leave the cost out.
        fewest: devices on which the job runs, with a measurement and, of several, a curve.
        predicts: a run at a world size.
        measured: whether that many have been measured, so that they need no margin of memory.
    """
    first = by_world_size[fewest]
    if isinstance(first, str):
        raise ValueError(f"{counted(fewest, 'device')} was not measured: {first}")
    start_up = first.start_up_seconds + extra_start_up_seconds
    curve, source = (None, None) if fewest == 1 else curves[fewest]
    alone = first if fewest == 1 else replace(first, start_up_seconds=start_up)
    one = _row(fewest, alone, predicts(alone, fewest, curve), source, here, price_per_gpu_hour, measured=measured)
    found = [one]
    for world in sorted(set(by_world_size) - {fewest}):
        work = by_world_size[world]
        curve, source = curves.get(world, (None, "its all-reduce was not measured"))
        if isinstance(work, str) or curve is None:
            reason = work if isinstance(work, str) else source
            found.append(Row(world_size=world, here=world <= here, source=None, reason=reason))
            continue
        work = replace(work, start_up_seconds=start_up)
        row = _row(world, work, predicts(work, world, curve), source, here, price_per_gpu_hour, measured=False)
        found.append(_compared_with_one(one, row, work, price_per_gpu_hour))
    return found


def _row(
    world: int,
    work: Work,
    prediction: Prediction,
    source: str | None,
    here: int,
    price: float | None,
    *,
    measured: bool,
) -> Row:
    memory = work.memory_bytes
    return Row(
        world_size=world,
        here=world <= max(here, 1),
        source=source,
        reason="measured",
        per_device=work.per_device,
        prediction=prediction,
        efficiency=1.0,
        fits=None if memory is None else (measured or held.fits(prediction.peak_memory_bytes, held.limit_of(memory))),
        cost=None if price is None else prediction.cost(price),
    )


def _compared_with_one(one: Row, row: Row, work: Work, price: float | None) -> Row:
    """The row with its comparison to that of the fewest devices."""
    assert one.prediction and row.prediction
    several, single = row.prediction, one.prediction
    breaks_even = several.break_even_steps(single)
    row = replace(row, efficiency=several.efficiency(single), break_even_steps=breaks_even)
    return replace(row, reason=_reason(row, several, single, work.memory_bytes))


def _reason(row: Row, several: Prediction, one: Prediction, memory_bytes: float | None) -> str:
    assert row.efficiency is not None
    faster = several.tokens_per_second / one.tokens_per_second
    lost = f"{percent(several.exposed_fraction)} of a step is waiting for communication"
    if row.fits is False:
        need, of = several.peak_memory_bytes / 2**30, (memory_bytes or 0) / 2**30
        return f"would need {need:.1f} GiB of a GPU's {of:.1f}, above the margin of {held.MEMORY_MARGIN}"
    if faster <= 1:
        return f"would be slower ({faster:.2f} times as fast; {lost})"
    if several.hours >= one.hours:
        steps = counted(math.ceil(row.break_even_steps or 0), "step")
        return f"would end later: they take longer to start, and make up for it after {steps}"
    below = f"below {percent(EFFICIENCY_TO_JUSTIFY)}" if row.efficiency < EFFICIENCY_TO_JUSTIFY else lost
    return f"would be {faster:.2f} times as fast ({percent(row.efficiency)} efficiency; {below})"


def choose(found: Sequence[Row], *, fastest: bool = False) -> Row | None:
    """The world size to launch here: the one whose run ends first, among those with an efficiency of at least 70 % (all
    if `fastest`), which the fewest devices have; of equal ones the fewer devices. None if none can be launched."""
    efficient = [row for row in found if fastest or (row.efficiency or 0.0) >= EFFICIENCY_TO_JUSTIFY]
    eligible = [(row.prediction.hours, row.world_size, row) for row in efficient if row.prediction and row.eligible]
    return min(eligible, default=(0.0, 0, None))[2]


def decision_sentence(chosen: Row, found: Sequence[Row]) -> str:
    """The decision and its reason.

    Args:
        found: as `rows` gives them.
    """
    if chosen is not found[0]:
        return f"{counted(chosen.world_size, 'device')}. They {chosen.reason}"
    several = chosen.world_size > 1
    few = f"{chosen.world_size} devices, the fewest that this job runs on" if several else "One device"
    if (nearest := nearest_here(found)) is None:
        return f"{few}. There are no more" if several else f"{few}. There is no second one"
    return f"{few}. {describe(nearest)}"


def nearest_here(found: Sequence[Row]) -> Row | None:
    """The most efficient number of devices here above the fewest."""
    return max((row for row in found[1:] if row.here), key=lambda row: row.efficiency or 0.0, default=None)


def describe(row: Row) -> str:
    """What more devices would bring, without a period."""
    if row.prediction is None:
        return f"{counted(row.world_size, 'device')}: {row.reason}"
    text = f"{'Two' if row.world_size == 2 else f'{row.world_size} devices'} {row.reason}"
    return text if row.here else f"{text}; not here, predicted from {row.source}"


def percent(share: float) -> str:
    """0.55 -> 55 %."""
    return f"{share:.0%}".replace("%", " %")
