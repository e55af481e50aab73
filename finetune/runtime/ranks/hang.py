"""Names a stuck rank: a thread per rank that reports its step and phase through the process group's store.

Each rank writes its standing to the store once a second. A rank that has been in one phase, or in one collective, for
too long sets a request; every rank that can then writes its Python stacks to OUT/hang/ and answers with its standing.
The lowest rank that answers writes the report. A long phase is only reported. A collective that has waited for
`training.ddp_timeout` ends the run, unless the ranks that are awaited answer and are known to be working: a slow save
must not be killed.

torch's own timeouts are set later than this one (`BACKSTOP_SECONDS`, `HOST_SECONDS`). They end a run without naming
anybody: by an exception in the waiting rank for gloo, by aborting its process for NCCL.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from finetune.runtime.files import open_new, write_json, write_text
from finetune.runtime.ranks import activity

POLL_SECONDS = 1.0
SLOW_SECONDS = 120.0  # in one phase, before it is reported; or so many median steps if that is longer:
SLOW_STEPS = 20
ANSWER_SECONDS = 5.0  # that ranks have to answer a request
SILENT_STORE_SECONDS = 10.0  # without an answer from the store, before its host counts as stuck
BACKSTOP_SECONDS = 60  # by which torch's timeout of the training's collectives exceeds training.ddp_timeout
# torch's timeout of host collectives. They wait for work of one rank alone, such as saving a model to a slow disk.
HOST_SECONDS = 24 * 3600
START_SECONDS = 1800  # that machines have to prepare their data, each for itself, before their ranks meet

IN_STEP = ("data", "forward", "backward", "optimizer")
# One rank alone may be in these phases for any time, while the others wait in a host collective.
PATIENT = frozenset({"saving", "loading the model", "reading the checkpoint"})

TIMEOUT, SLOW = "timeout", "slow"
_STANDING, _REQUEST, _ANSWER = "finetune/standing", "finetune/hang/request", "finetune/hang/answer"


class Store(Protocol):
    """What is used of torch's store, which all ranks share."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


# --- where a rank stands --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What a rank is doing.

    step:        the optimizer step in which it is, or the last complete one between steps; 0 before training
    seconds:     since the phase began
    collective:  the collective in which it waits for other ranks, or None
    waited:      seconds in that collective
    training:    whether it is one of the training's process group (gradients), not of the host's (barriers, objects)
    old:         whether it is what the rank last reported, and it may have got on since
    """

    rank: int
    step: int
    phase: str
    seconds: float
    collective: str | None = None
    waited: float = 0.0
    training: bool = False
    old: bool = False

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Standing:
        """The inverse of `to_json`."""
        return cls(**json.loads(text))

    def place(self) -> str:
        """Such as "step 4, phase backward", or "after step 4, phase saving"."""
        if self.phase in IN_STEP:
            return f"step {self.step}, phase {self.phase}"
        return f"{f'after step {self.step}' if self.step > 0 else 'before step 1'}, phase {self.phase}"

    def at(self) -> str:
        """The same with its preposition."""
        return f"at {self.place()}" if self.phase in IN_STEP else self.place()


def standing_of(rank: int, at: activity.Activity) -> Standing:
    """Where a rank stands that is doing that."""
    step = at.step + 1 if at.phase in IN_STEP else at.step
    return Standing(rank=rank, step=max(step, 0), phase=at.phase, seconds=time.monotonic() - at.since)


_waiting: tuple[str, float] | None = None  # the host collective of the main thread, and when it began


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
        pending = {(entry["profiling_name"], entry["record_id"]): now for entry in _recorded() if _is_pending(entry)}
        self._seen = {key: self._seen.get(key, first) for key, first in pending.items()}
        if not self._seen:
            return None
        (name, _), first = min(self._seen.items(), key=lambda item: (item[1], item[0][1]))
        return name, now - first


def _is_pending(entry: Mapping[str, Any]) -> bool:
    return entry["process_group"][1] == "default_pg" and not entry["retired"] and entry["state"] != "completed"


def _recorded() -> Iterable[Mapping[str, Any]]:
    """The entries of both flight recorders: NCCL's, which CPU builds of torch lack, and that of the other backends."""
    try:
        from torch._C import _distributed_c10d as c10d
    except ImportError:
        return
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        if hasattr(c10d, name):
            yield from json.loads(getattr(c10d, name)(True, True)).get("entries", ())  # collectives, only active ones


# --- what the answers mean ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Report:
    """What is known about ranks that do not get on.

    kind:      TIMEOUT if a collective has reached its limit, SLOW if a phase is long
    world_size: number of ranks
    answered:  standings of the ranks that answered, in rank order
    silent:    last standings of those that did not; None if nothing was ever heard of one
    limit:     training.ddp_timeout, in seconds
    """

    kind: str
    world_size: int
    answered: tuple[Standing, ...]
    silent: Mapping[int, Standing | None]
    limit: float

    @property
    def waiting(self) -> list[Standing]:
        """The ranks that wait in a collective, longest first."""
        return sorted((one for one in self.answered if one.collective), key=lambda one: (-one.waited, one.rank))

    @property
    def absent(self) -> list[Standing]:
        """The ranks that answered and for which others wait."""
        return [one for one in self.answered if not one.collective] if self.waiting else []

    @property
    def missing(self) -> list[int]:
        """The ranks that the others wait for."""
        return sorted([*self.silent, *(one.rank for one in self.absent)])

    @property
    def working(self) -> bool:
        """Whether the wait has a good reason: the ranks that are awaited do the work of one rank, or get on."""
        if self.silent or not self.absent or any(one.training for one in self.waiting):
            return False
        return all(one.phase in PATIENT or one.seconds < self.limit for one in self.absent)

    def to_dict(self) -> dict[str, Any]:
        """For report.json. A rank of which only an old standing is known has come to where the others wait for it."""
        waiting, reached = self.waiting, self._step()
        missing = []
        for rank in self.missing:
            one = self.silent[rank] if rank in self.silent else next(one for one in self.absent if one.rank == rank)
            step = reached if one is None else max(one.step, reached) if one.old else one.step
            about = {"phase": one.phase if one else None, "seconds": round(one.seconds, 1) if one else None}
            missing.append({"rank": rank, "step": step, **about, "answered": rank not in self.silent})
        return {
            "kind": self.kind,
            "time": time.time(),
            "world_size": self.world_size,
            "missing": missing,
            "answered": [dataclasses.asdict(one) for one in self.answered],
            "step": reached,
            "collective": waiting[0].collective if waiting else None,
            "waited_seconds": round(waiting[0].waited, 1) if waiting else None,
            "limit_seconds": self.limit,
        }

    def _step(self) -> int:
        """The step in which the ranks wait, or in which the slowest of those that answered is."""
        return min((one.step for one in self.waiting or self.answered), default=0)

    def sentence(self) -> str:
        """What is wrong, in one sentence without a full stop."""
        waiting = self.waiting
        if not self.missing and len(waiting) == self.world_size > 1:
            return self._of_a_collective_that_all_are_in()
        if not self.missing:
            longest = max(self.answered, key=lambda one: one.seconds)
            return f"rank {longest.rank} has been in one phase for {longest.seconds:.0f} s ({longest.place()})"
        who = "; ".join(self._of_missing(rank) for rank in self.missing)
        if not waiting:
            return who
        first = waiting[0]
        return f"{who}; {_named(waiting)} waited {first.waited:.0f} s for it in {first.collective} {first.at()}"

    def _of_a_collective_that_all_are_in(self) -> str:
        waiting = self.waiting
        if len({(one.step, one.collective) for one in waiting}) == 1:
            first = waiting[0]
            return (
                f"all ranks have waited {first.waited:.0f} s in {first.collective} ({first.place()}), which does not "
                "complete: a GPU or the network between the ranks may have failed"
            )
        where = "; ".join(f"rank {one.rank} in {one.collective} ({one.place()})" for one in self.answered)
        return f"the ranks wait for each other in different collectives: {where}"

    def _of_missing(self, rank: int) -> str:
        verb = "keeps the others waiting" if self.working else "is missing"
        if rank not in self.silent:
            one = next(one for one in self.absent if one.rank == rank)
            return f"rank {rank} {verb} {one.at()}, where it has been for {one.seconds:.0f} s"
        last, waiting = self.silent[rank], self.waiting
        if last and not last.old:
            since = f"where it has been for {last.seconds:.0f} s"
            return f"rank {rank} {verb} {last.at()}, {since}: it does not answer"
        at = f" at step {self._step()}" if waiting and waiting[0].step > 0 else ""
        heard = f"last reported {last.place()}" if last else "never reported where it is"
        return f"rank {rank} {verb}{at}: it does not answer and {heard}"

    def markdown(self) -> str:
        """report.md."""
        rows = [
            f"| {one.rank} | yes | {one.step} | {one.phase} | {one.seconds:.0f} | "
            + (f"{one.collective}, {one.waited:.0f} s |" if one.collective else "|")
            for one in self.answered
        ]
        rows += [
            f"| {rank} | **no** | {last.step} | {last.phase}{' (last report)' if last.old else ''} | | |"
            if last
            else f"| {rank} | **no** |||||"
            for rank, last in self.silent.items()
        ]
        sentence = self.sentence()
        return "\n".join(
            [
                "# A rank does not get on" if self.kind == TIMEOUT else "# A long phase",
                "",
                f"{sentence[0].upper()}{sentence[1:]}.",
                "",
                f"Limit of a collective (training.ddp_timeout): {self.limit:.0f} s.",
                "",
                "| rank | answered | step | phase | seconds in it | waits in |",
                "|---|---|---|---|---|---|",
                *rows,
                "",
                "`rank-N.txt` beside this file has the Python stacks of rank N, if it could answer. `nccl-rank-N` and",
                "`gloo-rank-N` are torch's flight records; `torchfrtrace` reads them.",
                "",
            ]
        )


def _named(standings: Iterable[Standing]) -> str:
    """Such as "rank 0 has" or "ranks 0, 2 have"."""
    ranks = sorted(one.rank for one in standings)
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"


def slow_after(step_seconds: list[float]) -> float:
    """Seconds after which a phase is long, given those of recent steps."""
    return max(SLOW_SECONDS, SLOW_STEPS * statistics.median(step_seconds)) if step_seconds else SLOW_SECONDS


# --- the watch ------------------------------------------------------------------------------------------------------

Fail = Callable[[str, list[int], bool], None]


class Watch:
    """Follows this rank, and answers for it.

    `round` is called once a second by the thread that polls the store. `guard` runs in a second thread, which needs no
    store: a rank that hosts the store and is stopped takes the store with it.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        store: Store,
        limit: float,
        setting: str | None,
        store_rank: int | None,
        look: Callable[[int], activity.Activity | None],
        fail: Fail,
    ) -> None:
        """
        Args:
            limit: seconds that a collective may wait.
            setting: the name of that limit for the user; None if it cannot be set.
            store_rank: the rank whose process hosts the store, or None if it is the launcher.
            look: what a rank that does not answer is doing, if that can be found out.
            fail: `fail(message, silent ranks, whether the store answers)` ends the run.
        """
        self.rank, self.world_size, self.store, self.limit = rank, world_size, store, limit
        self.setting, self.store_rank, self.fail = setting, store_rank, fail
        self.folder: Path | None = None  # of the reports; without one, only a timeout is looked for
        self._pending = PendingCollectives()
        self._next_limit = limit
        self._reported: activity.Activity | None = None
        self._warned: set[tuple[int, str]] = set()
        self._request, self._number = "", 0
        self._store_answered_at = time.monotonic()
        self._look, self._last_of_host = look, None
        self._steps = _StepTimes()

    def standing(self) -> Standing:
        """Where this rank is now."""
        now, at, held = time.monotonic(), activity.current(), _waiting
        own = standing_of(self.rank, at)
        if held is not None:
            return dataclasses.replace(own, collective=held[0], waited=now - held[1])
        if own.seconds >= min(POLL_SECONDS, self.limit / 4):  # reading the recorder is not for every second of training
            with contextlib.suppress(Exception):  # private to torch
                oldest = self._pending.oldest()
                if oldest is not None:
                    return dataclasses.replace(own, collective=oldest[0], waited=oldest[1], training=True)
        return own

    def round(self) -> None:
        """Write this rank's standing; request, answer and conclude. May raise what the store raises."""
        at, own = activity.current(), self.standing()
        self._steps.note(at)
        self.store.set(f"{_STANDING}/{self.rank}", own.to_json())
        if self.store_rank not in (None, self.rank):
            self._last_of_host = self._last_standing(self.store_rank)
        kind = self._complaint(at, own)
        raw = self.store.get(_REQUEST).decode() if self.store.check([_REQUEST]) else ""
        if kind is not None and raw == self._request:
            wanted = json.dumps({"number": self._number + 1, "kind": kind, "rank": self.rank})
            raw = self.store.compare_set(_REQUEST, raw, wanted).decode()
        if raw != self._request:
            request = json.loads(raw)
            self._request, self._number = raw, request["number"]
            self._answer(request["kind"])
            self._conclude(request["kind"])
        self._store_answered_at = time.monotonic()

    def guard(self, stop: threading.Event) -> None:
        """End the run if a collective has reached its limit and the store does not answer."""
        while not stop.wait(POLL_SECONDS):
            own = self.standing()
            silent_for = time.monotonic() - self._store_answered_at
            if self.store_rank in (None, self.rank) or silent_for < SILENT_STORE_SECONDS or own.waited < self.limit:
                continue
            stop.wait(self.rank - 1)  # the lowest of the others reports, and its end is theirs
            report = Report(
                kind=TIMEOUT,
                world_size=self.world_size,
                answered=(own,),
                silent={self.store_rank: self._look_at(self.store_rank) or self._last_of_host},
                limit=self.limit,
            )
            self._write_stacks(TIMEOUT)
            self._write_report(report)
            self.fail(self._error(report), list(report.silent), False)

    def _complaint(self, at: activity.Activity, own: Standing) -> str | None:
        """Why this rank requests a report now, if it does."""
        if own.waited < self.limit:
            self._next_limit = self.limit
        elif own.waited >= self._next_limit:
            return TIMEOUT
        long = self.folder is not None and at is not self._reported
        return SLOW if long and own.seconds >= slow_after(self._steps.seconds) else None

    def _answer(self, kind: str) -> None:
        at, own = activity.current(), self.standing()
        if kind == TIMEOUT and own.collective:
            self._next_limit = own.waited + self.limit
        if own.seconds >= SLOW_SECONDS / 2:
            self._reported = at
        self._write_stacks(kind)
        self.store.set(f"{_ANSWER}/{self._number}/{self.rank}", own.to_json())

    def _conclude(self, kind: str) -> None:
        keys = {rank: f"{_ANSWER}/{self._number}/{rank}" for rank in range(self.world_size)}
        until = time.monotonic() + ANSWER_SECONDS
        while not self.store.check(list(keys.values())) and time.monotonic() < until:
            threading.Event().wait(0.1)
        there = [rank for rank, key in keys.items() if self.store.check([key])]
        if self.rank != min(there):
            return
        report = Report(
            kind=kind,
            world_size=self.world_size,
            answered=tuple(Standing.from_json(self.store.get(keys[rank])) for rank in there),
            silent={rank: self._look_at(rank) or self._last_standing(rank) for rank in keys if rank not in there},
            limit=self.limit,
        )
        self._write_report(report)
        if kind == TIMEOUT and not report.working:
            self.fail(self._error(report), list(report.silent), True)
        else:
            self._warn(report)

    def _look_at(self, rank: int) -> Standing | None:
        at = self._look(rank)
        return standing_of(rank, at) if at else None

    def _last_standing(self, rank: int | None) -> Standing | None:
        key = f"{_STANDING}/{rank}"
        return (
            dataclasses.replace(Standing.from_json(self.store.get(key)), old=True) if self.store.check([key]) else None
        )

    def _error(self, report: Report) -> str:
        sentence = report.sentence()
        advice = [f"See {self.folder / 'report.md'}."] if self.folder else []
        if self.setting:
            advice.append(f"If the rank was only slow, raise {self.setting}.")
        limit = f"the limit, {self.setting}," if self.setting else "the limit"
        return " ".join([f"{sentence[0].upper()}{sentence[1:]} ({limit} is {self.limit:g} s).", *advice])

    def _warn(self, report: Report) -> None:
        """Once for each rank and phase."""
        about = {(rank, "") for rank in report.missing} or {(one.rank, one.phase) for one in report.answered}
        if about <= self._warned:
            return
        self._warned |= about
        see = f" See {self.folder / 'report.md'}." if self.folder else ""
        text = f"warning: {report.sentence()}. The run continues.{see}\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode())

    # Files. A disk that is full or hangs must not keep the run from ending: a failure costs the file.

    def _write_stacks(self, kind: str) -> None:
        if self.folder is None:
            return
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with open_new(self.folder / f"rank-{self.rank}.txt") as file:
                file.write(f"{self.standing()}\n\n".encode())
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        if kind == TIMEOUT and self.world_size > 1:
            self._write_flight_records(self.folder)

    def _write_flight_records(self, folder: Path) -> None:
        with contextlib.suppress(Exception):  # private to torch
            from torch._C import _distributed_c10d as c10d

            for name, file in (("_dump_nccl_trace", "nccl"), ("_dump_fr_trace", "gloo")):
                if hasattr(c10d, name):  # collectives, but not their stacks, which need the interpreter's lock
                    with open_new(folder / f"{file}-rank-{self.rank}") as written:
                        written.write(getattr(c10d, name)(True, False, False))

    def _write_report(self, report: Report) -> None:
        if self.folder is not None:
            with contextlib.suppress(OSError):
                write_json(self.folder / "report.json", report.to_dict())
                write_text(self.folder / "report.md", report.markdown())


class _StepTimes:
    """Seconds of recent steps, as seen once a second."""

    KEPT = 101

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last: tuple[int, float] | None = None

    def note(self, at: activity.Activity) -> None:
        """Compare with the last look: the mean of the steps since then stands for each of them."""
        if at.step < 0:
            return
        step, since = self._last or (at.step, at.since)
        if at.step > step:
            self.seconds = [*self.seconds, (at.since - since) / (at.step - step)][-self.KEPT :]
        if self._last is None or at.step > step:
            self._last = (at.step, at.since)


# --- the watch of this process --------------------------------------------------------------------------------------

_watch: Watch | None = None


def start(watch: Watch, stop: threading.Event) -> threading.Thread:
    """Make `watch` the one of this process and start its guard, a thread. The caller calls `watch.round()`."""
    global _watch
    _watch = watch
    guard = threading.Thread(target=watch.guard, args=(stop,), daemon=True)
    guard.start()
    return guard


@contextlib.contextmanager
def reporting(folder: Path) -> Iterator[None]:
    """Reports go to `folder`, inside and, with several ranks, until the process ends. A single rank is followed inside
    only, and only for long phases."""
    _send_flight_records_to(folder)
    if _watch is not None:
        _watch.folder = folder
        yield
        return
    stop = threading.Event()
    alone = Watch(
        rank=0,
        world_size=1,
        store=_OwnStore(),
        limit=float("inf"),
        setting=None,
        store_rank=None,
        look=lambda rank: None,
        fail=lambda *_: None,
    )
    alone.folder = folder
    thread = threading.Thread(target=_follow, args=(alone, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _follow(watch: Watch, stop: threading.Event) -> None:
    while not stop.wait(POLL_SECONDS):
        watch.round()


def _send_flight_records_to(folder: Path) -> None:
    """Where NCCL's watchdog writes its flight recorder if torch's own timeout ends the run. The user's choice stays."""
    if not {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"} & os.environ.keys():
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(folder.absolute() / "nccl-rank-")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


class _OwnStore:
    """The store of a single rank."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes:
        return self._values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self._values.get(key, "") == expected:
            self._values[key] = desired
        return self.get(key)
