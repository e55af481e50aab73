"""What a rank is doing: its step, its phase, and the collective in which it waits for other ranks."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from finetune.runtime.ranks import activity
from finetune.runtime.types import JsonObject, Stored

IN_STEP = ("data", "forward", "backward", "optimizer")


@dataclass(frozen=True, kw_only=True)
class RankStatus(Stored):
    """What a rank is doing.

    step:        the optimizer step in which it is, or the last complete one between steps; 0 before training
    seconds:     since the phase began
    collective:  the collective in which it waits for other ranks, or None
    waited:      seconds in that collective
    training:    whether it is one of the training's process group (gradients), not of the host's (barriers, objects)
    old:         whether it is what the rank last reported; it may have progressed since
    """

    rank: int
    step: int
    phase: str
    seconds: float
    collective: str | None = None
    waited: float = 0.0
    training: bool = False
    old: bool = False

    def position(self) -> str:
        """Such as "step 4, phase backward", or "after step 4, phase saving"."""
        if self.phase in IN_STEP:
            return f"step {self.step}, phase {self.phase}"
        return f"{f'after step {self.step}' if self.step > 0 else 'before step 1'}, phase {self.phase}"

    def at_position(self) -> str:
        """The same with its preposition, such as "at step 4, phase backward"."""
        return f"at {self.position()}" if self.phase in IN_STEP else self.position()


def from_activity(rank: int, at: activity.Activity) -> RankStatus:
    """The status of a rank from its activity."""
    step = at.step + 1 if at.phase in IN_STEP else at.step
    return RankStatus(rank=rank, step=max(step, 0), phase=at.phase, seconds=time.monotonic() - at.since)


_waiting: tuple[str, float] | None = None


def host_collective() -> tuple[str, float] | None:
    """The host collective in which the main thread waits for the other ranks, and when it began; None outside."""
    return _waiting


@contextlib.contextmanager
def waiting(collective: str) -> Iterator[None]:
    """Inside, this process waits for the other ranks in a host collective."""
    global _waiting
    before, _waiting = _waiting, (collective, time.monotonic())
    try:
        yield
    finally:
        _waiting = before


class PendingCollectives:
    """The training's collectives that have not completed, from torch's flight recorder (a private interface).

    Without a flight recorder (`TORCH_FR_BUFFER_SIZE=0`) there are none, and torch's own timeout ends a hung run.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], float] = {}  # when each was first seen: not the wall clock, which can jump

    def oldest(self) -> tuple[str, float] | None:
        """(name, seconds since it was first seen) of the one that has been pending longest, or None."""
        now = time.monotonic()
        groups = ("default_pg", SHARED_ROWS)  # the other group is the host's
        of_training = [one for one in recorded_collectives() if one["process_group"][1].startswith(groups)]
        active = [one for one in of_training if not one["retired"] and one["state"] != "completed"]
        pending = {(_name(one), one["record_id"]): now for one in active}
        self._seen = {key: self._seen.get(key, first) for key, first in pending.items()}
        if not self._seen:
            return None
        (name, _), first = min(self._seen.items(), key=lambda item: (item[1], item[0][1]))
        return name, now - first


SHARED_ROWS = "context_parallel"  # begins the description of a process group whose ranks share rows


def _name(entry: JsonObject) -> str:
    """Such as "nccl:all_reduce" or "nccl:all_to_all (context_parallel of ranks 2 to 3)"."""
    name, group = entry["profiling_name"], entry["process_group"][1]
    return f"{name} ({group})" if group.startswith(SHARED_ROWS) else name


def recorded_collectives() -> Iterable[JsonObject]:
    """The entries of both flight recorders: NCCL's, which CPU builds of torch lack, and that of the other backends."""
    try:
        from torch._C import _distributed_c10d as c10d
    except ImportError:
        return
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        if hasattr(c10d, name):
            yield from json.loads(getattr(c10d, name)(True, True)).get("entries", ())  # collectives, only active ones
