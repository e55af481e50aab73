"""Choose a world size from predictions, with a reason for each in one sentence. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
) -> list[Row]:
    """One row per world size of `by_world_size`, that of one device first.

    Args:
        by_world_size: one rank's share of the run, or the reason why it could not be measured; that of one device is
            known.
        curves: by world size above 1, its all-reduce and the source of it; or None and the reason.
        here: devices of this machine.
        extra_start_up_seconds: time that several ranks need to connect, on top of the start-up of one.
        price_per_gpu_hour: at least zero; None to leave the cost out.
    """
    first = by_world_size[1]
    if isinstance(first, str):
        raise ValueError(f"one device was not measured: {first}")
    alone = predict(first, 1, None)
    found = []
    for world in sorted(by_world_size):
        work, is_one = by_world_size[world], world == 1
        curve, source = curves.get(world, (None, "its all-reduce was not measured"))
        if isinstance(work, str) or curve is None and not is_one:
            reason = work if isinstance(work, str) else source
            found.append(Row(world_size=world, here=world <= here, source=None, reason=reason))
            continue
        if not is_one:
            work = replace(work, start_up_seconds=first.start_up_seconds + extra_start_up_seconds)
        several, memory = predict(work, world, None if is_one else curve), work.memory_bytes
        fits = is_one or memory is None or held.fits(several.peak_memory_bytes, held.limit_of(memory))
        row = Row(
            world_size=world,
            here=is_one or world <= here,
            source=None if is_one else source,
            reason="measured",
            per_device=work.per_device,
            prediction=several,
            efficiency=several.efficiency(alone),
            fits=None if memory is None else fits,
            cost=None if price_per_gpu_hour is None else several.cost(price_per_gpu_hour),
            break_even_steps=None if is_one else several.break_even_steps(alone),
        )
        found.append(row if is_one else replace(row, reason=_reason(row, several, alone, memory)))
    return found


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


def choose(found: Sequence[Row], *, fastest: bool = False) -> Row:
    """The world size to launch here: the one whose run ends first, among those with an efficiency of at least 70 % (all
    if `fastest`), which one device has; of equal ones the fewer devices."""
    efficient = [row for row in found if fastest or (row.efficiency or 0.0) >= EFFICIENCY_TO_JUSTIFY]
    return min((row.prediction.hours, row.world_size, row) for row in efficient if row.prediction and row.eligible)[2]


def decision_sentence(chosen: Row, found: Sequence[Row]) -> str:
    """The decision and its reason.

    Args:
        found: as `rows` gives them.
    """
    if chosen is not found[0]:
        return f"{counted(chosen.world_size, 'device')}. They {chosen.reason}"
    nearest = nearest_here(found)
    return f"One device. {'There is no second one' if nearest is None else describe(nearest)}"


def nearest_here(found: Sequence[Row]) -> Row | None:
    """The most efficient number of devices here above one."""
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
