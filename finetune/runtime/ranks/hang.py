"""Names a stuck rank: a thread per rank that reports its step and phase through the process group's store.

Each rank writes its status to the store once a second. A rank that has been in one phase, or in one collective, for
too long sets a request; every rank that can then writes its Python stacks to OUT/hang/ and answers with its status.
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
from collections.abc import Callable, Iterator
from pathlib import Path

from finetune.runtime.files import open_new, write_json, write_text
from finetune.runtime.ranks import activity, rank_status
from finetune.runtime.ranks.hang_report import SLOW, TIMEOUT, Report
from finetune.runtime.ranks.rank_status import RankStatus
from finetune.runtime.types import RankStore

POLL_SECONDS = 1.0
SLOW_SECONDS = 120.0  # in one phase, before it is reported; or so many median steps if that is longer:
SLOW_STEPS = 20
ANSWER_SECONDS = 5.0  # that ranks have to answer a request
BACKSTOP_SECONDS = 60  # by which torch's timeout of the training's collectives exceeds training.ddp_timeout
# torch's timeout of host collectives. They wait for work of one rank alone, such as saving a model to a slow disk.
HOST_SECONDS = 24 * 3600

STATUS, REQUEST, ANSWER = "finetune/standing", "finetune/hang/request", "finetune/hang/answer"  # keys in the store


def slow_phase_seconds(step_seconds: list[float]) -> float:
    """Seconds after which a phase is long, given those of recent steps."""
    return max(SLOW_SECONDS, SLOW_STEPS * statistics.median(step_seconds)) if step_seconds else SLOW_SECONDS


Fail = Callable[[str, list[int]], None]


class Watch:
    """Follows this rank, and answers for it.

    `poll` is called once a second by the thread that polls the store.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        store: RankStore,
        limit: float,
        setting: str | None,
        read_activity: Callable[[int], activity.Activity | None],
        fail: Fail,
    ) -> None:
        """
        Args:
            limit: seconds that a collective may wait.
            setting: the name of that limit for the user; None if it cannot be set.
            read_activity: what a rank that does not answer is doing, if that can be found out.
            fail: `fail(message, silent ranks)` ends the run.
        """
        self.rank, self.world_size, self.store, self.limit = rank, world_size, store, limit
        self.setting, self.fail = setting, fail
        self.folder: Path | None = None  # of the reports; without one, only a timeout is looked for
        self._pending = rank_status.PendingCollectives()
        self._next_limit = limit
        self._reported: activity.Activity | None = None
        self._warned: set[tuple[int, str]] = set()
        self._request, self._number = "", 0
        self._read_activity = read_activity
        self._steps = StepTimes()

    def status(self) -> RankStatus:
        """What this rank is doing now."""
        now, at, host = time.monotonic(), activity.current(), rank_status.host_collective()
        own = rank_status.from_activity(self.rank, at)
        if host is not None:
            return dataclasses.replace(own, collective=host[0], waited=now - host[1])
        if own.seconds >= min(POLL_SECONDS, self.limit / 4):  # reading the recorder is not for every second of training
            with contextlib.suppress(Exception):  # private to torch
                oldest = self._pending.oldest()
                if oldest is not None:
                    return dataclasses.replace(own, collective=oldest[0], waited=oldest[1], training=True)
        return own

    def poll(self) -> None:
        """Write this rank's status; request, answer and conclude. May raise what the store raises."""
        at, own = activity.current(), self.status()
        self._steps.note(at)
        self.store.set(f"{STATUS}/{self.rank}", own.to_json())
        kind = self._report_kind(at, own)
        raw = self.store.get(REQUEST).decode() if self.store.check([REQUEST]) else ""
        if kind is not None and raw == self._request:
            wanted = json.dumps({"number": self._number + 1, "kind": kind, "rank": self.rank})
            raw = self.store.compare_set(REQUEST, raw, wanted).decode()
        if raw != self._request:
            request = json.loads(raw)
            self._request, self._number = raw, request["number"]
            self._answer(request["kind"])
            self._conclude(request["kind"])

    def _report_kind(self, at: activity.Activity, own: RankStatus) -> str | None:
        """The kind of report that this rank requests now; None if it requests none."""
        if own.waited < self.limit:
            self._next_limit = self.limit
        elif own.waited >= self._next_limit:
            return TIMEOUT
        long = self.folder is not None and at is not self._reported
        return SLOW if long and own.seconds >= slow_phase_seconds(self._steps.seconds) else None

    def _answer(self, kind: str) -> None:
        at, own = activity.current(), self.status()
        if kind == TIMEOUT and own.collective:
            self._next_limit = own.waited + self.limit
        if own.seconds >= SLOW_SECONDS / 2:
            self._reported = at
        self._write_stacks(kind)
        self.store.set(f"{ANSWER}/{self._number}/{self.rank}", own.to_json())

    def _conclude(self, kind: str) -> None:
        keys = {rank: f"{ANSWER}/{self._number}/{rank}" for rank in range(self.world_size)}
        until = time.monotonic() + ANSWER_SECONDS
        while not self.store.check(list(keys.values())) and time.monotonic() < until:
            threading.Event().wait(0.1)
        there = [rank for rank, key in keys.items() if self.store.check([key])]
        if self.rank != min(there):
            return
        report = Report(
            kind=kind,
            world_size=self.world_size,
            answered=tuple(RankStatus.from_json(self.store.get(keys[rank])) for rank in there),
            silent={rank: self._status_of_silent(rank) for rank in keys if rank not in there},
            limit=self.limit,
        )
        if self.folder is not None:
            with contextlib.suppress(OSError):  # as in `_write_stacks`
                write_json(self.folder / "report.json", report.to_dict())
                write_text(self.folder / "report.md", report.markdown())
        if kind == TIMEOUT and not report.working:
            self.fail(self._error(report), list(report.silent))
        elif kind == SLOW or report.missing:
            self._warn(report)

    def _status_of_silent(self, rank: int) -> RankStatus | None:
        """What a rank that does not answer is doing: as this process can see, or else as it last reported."""
        if (at := self._read_activity(rank)) is not None:
            return rank_status.from_activity(rank, at)
        key = f"{STATUS}/{rank}"
        if not self.store.check([key]):
            return None
        return dataclasses.replace(RankStatus.from_json(self.store.get(key)), old=True)

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
                file.write(f"{self.status()}\n\n".encode())
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        if kind != TIMEOUT or self.world_size == 1:
            return
        with contextlib.suppress(Exception):  # private to torch
            from torch._C import _distributed_c10d as c10d

            for name, file in (("_dump_nccl_trace", "nccl"), ("_dump_fr_trace", "gloo")):
                if hasattr(c10d, name):  # collectives, but not their stacks, which need the interpreter's lock
                    with open_new(self.folder / f"{file}-rank-{self.rank}") as written:
                        written.write(getattr(c10d, name)(True, False, False))


class StepTimes:
    """Seconds of recent steps, as seen once a second."""

    KEPT = 101

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last: tuple[int, float] | None = None

    def note(self, at: activity.Activity) -> None:
        """Compare with the last call: each step since then counts with their mean time."""
        if at.step < 0:
            return
        step, since = self._last or (at.step, at.since)
        if at.step > step:
            self.seconds = [*self.seconds, (at.since - since) / (at.step - step)][-self.KEPT :]
        if self._last is None or at.step > step:
            self._last = (at.step, at.since)


# --- the watch of this process --------------------------------------------------------------------------------------

_watch: Watch | None = None


def start(watch: Watch) -> None:
    """Make `watch` the one of this process. The caller calls `watch.poll()`."""
    global _watch
    _watch = watch


@contextlib.contextmanager
def reporting(folder: Path) -> Iterator[None]:
    """Reports go to `folder`, inside and, with several ranks, until the process ends. A single rank is followed inside
    only, and only for long phases."""
    send_flight_records_to(folder)
    if _watch is not None:
        _watch.folder = folder
        yield
        return
    from torch.distributed import HashStore

    stop = threading.Event()
    alone = Watch(
        rank=0,
        world_size=1,
        store=HashStore(),
        limit=float("inf"),
        setting=None,
        read_activity=lambda rank: None,
        fail=lambda *_: None,
    )
    alone.folder = folder

    def follow() -> None:
        while not stop.wait(POLL_SECONDS):
            alone.poll()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def send_flight_records_to(folder: Path) -> None:
    """Where NCCL's watchdog writes its flight recorder if torch's own timeout ends the run. The user's choice stays."""
    if not {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"} & os.environ.keys():
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(folder.absolute() / "nccl-rank-")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
