"""What each rank did: runs/ranks.jsonl as arrays of records x ranks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from finetune.review.values import count, mapping, number, sequence, text
from finetune.runtime.files import open_regular
from finetune.runtime.tags import PHASES
from finetune.runtime.types import JsonObject

MOST_RANKS = 1024
MOST_RECORDS = 20_000  # of longer runs every second, third, ... record is kept
MOST_LINE = 1 << 22  # bytes
TIMES = ("step", *PHASES, "own_work", "wait")  # seconds of a typical step, but `wait`: seconds of the record
COUNTS = ("tokens", "squared_lengths", "allocator_retries")
MEMORY = ("peak_gib", "reserved_gib")
GPU = ("utilization", "sm_clock_mhz", "power_w", "temperature_c", "throttled", "samples", "other_processes")
WARM_UP = 10  # steps that are left out: compilation, first allocations
POWER_CAP = "power cap"
SHORT = 20  # steps of a run that is too short for it: only the first step is left out


@dataclass(frozen=True, eq=False)
class Ranks:
    """Records of a run in the order of steps, from its last start with this number of ranks on."""

    numbers: list[int]  # of the ranks, one per column
    about: list[JsonObject]  # per column: host, device, gpu, uuid, memory_gib; None where not recorded
    steps: np.ndarray  # int64 [records], the last step of each
    begun: np.ndarray  # int64 [records], steps of this process that were complete when the record began
    counts: np.ndarray  # int64 [records], steps in each
    times: np.ndarray  # float64 [records], seconds since the epoch
    evaluation: np.ndarray  # float64 [records], seconds
    saving: np.ndarray  # float64 [records], seconds
    step_seconds: np.ndarray  # float64, of every step of rank 0
    columns: dict[str, np.ndarray]  # float64 [records, ranks], by the names above; GPU's begin with "gpu_"
    reasons: list[Counter[str]] = field(default_factory=list)  # per column: throttle reasons

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.numbers)

    def typical(self) -> np.ndarray:
        """bool [records]: those after the warm-up."""
        long = self.steps.size > 0 and int(self.begun[-1] + self.counts[-1]) > SHORT
        kept = self.begun >= (WARM_UP if long else 1)
        return kept if kept.any() else np.ones(len(self.steps), bool)

    def column(self, name: str) -> np.ndarray:
        """float64 [typical records, ranks]; NaN where not recorded."""
        return self.columns[name][self.typical()]

    def throttle_reasons(self, column: int) -> str:
        """The most frequent reasons of a rank's GPU, for a sentence; the power cap, which healthy GPUs report under
        full load, only if there is no other."""
        reasons = [name for name, _ in self.reasons[column].most_common(4)]
        return ", ".join([name for name in reasons if name != POWER_CAP] or reasons)

    def host(self, column: int) -> str:
        """Where the rank of a column ran, for a sentence."""
        host = self.about[column]["host"]
        return f"host {host}" if host else "the host of that rank"

    def names(self, column: int) -> str:
        """The rank of a column for a sentence, such as `rank 1 (host a, GPU 1, NVIDIA H200)`."""
        about = self.about[column]
        parts = [f"host {about['host']}"] if about["host"] else []
        parts += [f"GPU {about['gpu']}"] if about["gpu"] is not None else []
        parts += [about["device"]] if about["device"] else []
        return f"rank {self.numbers[column]}" + (f" ({', '.join(parts)})" if parts else "")


def read(path: Path) -> Ranks | None:
    """The records of a file; None if there are none. A damaged line is left out.

    Raises:
        OSError: the file cannot be read.
    """
    starts: list[tuple[int, JsonObject]] = []  # (how many records precede, line)
    lines: list[JsonObject] = []
    with open_regular(path) as file:
        while line := file.readline(MOST_LINE):
            entry = _entry(line)
            if entry.get("kind") == "start":
                step = count(entry.get("step")) or 0
                lines = [one for one in lines if one["step"] <= step]
                starts.append((len(lines), entry))
            elif entry.get("kind") == "record" and count(entry.get("step")) is not None:
                entry["begun"] = entry["step"] - (count(starts[-1][1].get("step")) or 0 if starts else 0)
                lines.append(entry)
            if len(lines) > 2 * MOST_RECORDS:
                lines = lines[::2]
                starts = [(place // 2, entry) for place, entry in starts]
    return from_lines([entry for _, entry in starts], lines)


def _entry(line: bytes) -> JsonObject:
    try:
        return mapping(json.loads(line))
    except (ValueError, RecursionError):
        return {}


def from_lines(starts: list[JsonObject], lines: list[JsonObject]) -> Ranks | None:
    """Arrays from the entries of a file; records with another number of ranks than the last are left out."""
    lines = [one for one in lines if rank_entries(one)]
    if not lines:
        return None
    numbers = sorted(rank_entries(lines[-1]))
    lines = [one for one in lines if sorted(rank_entries(one)) == numbers]
    known = {}
    for start in starts:
        known |= rank_entries(start)
    entries = [[rank_entries(one)[number] for number in numbers] for one in lines]
    shape = (len(lines), len(numbers))
    names = TIMES + COUNTS + MEMORY
    columns = {name: _matrix((one.get(name) for row in entries for one in row), shape) for name in names}
    gpus = [[mapping(one.get("gpu")) for one in row] for row in entries]
    columns |= {f"gpu_{name}": _matrix((one.get(name) for row in gpus for one in row), shape) for name in GPU}
    counts = np.array([count(one.get("steps")) or 1 for one in lines], np.int64)
    steps = np.array([one["step"] for one in lines], np.int64)
    return Ranks(
        numbers=numbers,
        about=[_about(known.get(number, {})) for number in numbers],
        steps=steps,
        begun=np.array([count(one.get("begun", one["step"])) or 0 for one in lines], np.int64) - counts,
        counts=counts,
        times=_vector(one.get("time") for one in lines),
        evaluation=np.nan_to_num(_vector(one.get("evaluation_seconds") for one in lines)),
        saving=np.nan_to_num(_vector(one.get("saving_seconds") for one in lines)),
        step_seconds=_vector(value for one in lines for value in sequence(one.get("step_seconds"))),
        columns=columns,
        reasons=[_reasons(row[place] for row in gpus) for place in range(len(numbers))],
    )


def rank_entries(entry: JsonObject) -> dict[int, JsonObject]:
    """The ranks of a line, by number."""
    found = {}
    for one in sequence(entry.get("ranks"))[:MOST_RANKS]:
        rank = count(mapping(one).get("rank"))
        if rank is not None and rank < 1 << 20:
            found[rank] = one
    return found


def _about(entry: JsonObject) -> JsonObject:
    names = {name: text(entry.get(name)) for name in ("host", "device", "uuid")}
    return names | {"gpu": count(entry.get("gpu")), "memory_gib": number(entry.get("memory_gib"))}


def _reasons(samples: Iterable[JsonObject]) -> Counter[str]:
    found: Counter[str] = Counter()
    for sample in samples:
        found.update(name for reason in sequence(sample.get("reasons"))[:16] if (name := text(reason)))
    return found


def _vector(values: Iterable[object]) -> np.ndarray:
    return np.array([np.nan if (found := number(value)) is None else found for value in values], np.float64)


def _matrix(values: Iterable[object], shape: tuple[int, int]) -> np.ndarray:
    return _vector(values).reshape(shape)
