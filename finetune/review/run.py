"""A run as it was recorded: TensorBoard's events, run.json, ranks.jsonl and a hang report, whichever there are.

Nothing that a file says is believed before its type is checked: what is missing or invalid is "not recorded", never
zero. Runs of TRL and Unsloth have events alone.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from finetune.errors import UserError
from finetune.review import events
from finetune.review import ranks as rank_records
from finetune.review.events import Series
from finetune.review.ranks import SHORT, WARM_UP, Ranks
from finetune.review.values import at, count, json_object, mapping, number, text
from finetune.runtime import tags
from finetune.runtime.types import JsonObject
from finetune.text import counted

RUN_FILE, RANKS_FILE, HANG_FILE = "run.json", "ranks.jsonl", "hang/report.json"
SILENT_SECONDS = 600.0  # a run that has written nothing for longer is not running, unless its steps are that long
MOST_FILES = 1000  # event files of one run
_RECORDED = {  # metric: its figure in run.json
    "tokens_per_gpu": "tokens_per_second_per_gpu",
    "tokens_total": "tokens_per_second_per_gpu",
    "rows_per_second": "rows_per_second",
    "mfu": "mfu",
    "padding": "padding_fraction",
}
MOST_DEPTH = 4  # folders below the one that is searched for runs


@dataclass(frozen=True, eq=False)
class Run:
    """What is known of a run.

    Attributes:
        folder: the one that was given.
        output: the folder with run.json; None for a run of another trainer.
        record: content of run.json; values are unchecked, `at` and `number` read them.
        scalars: events by tag.
        problems: sentences about files that could not be read.
    """

    folder: Path
    name: str
    output: Path | None = None
    record: JsonObject = field(default_factory=dict)
    scalars: dict[str, Series] = field(default_factory=dict)
    ranks: Ranks | None = None
    hang: JsonObject | None = None
    hang_time: float | None = None
    problems: tuple[str, ...] = ()
    now: float = field(default_factory=time.time)

    def at(self, path: str) -> Any:
        """A value of run.json by its dotted path, unchecked."""
        return at(self.record, path)

    def number(self, path: str) -> float | None:
        """A finite number of run.json by its dotted path."""
        return number(self.at(path))

    def text(self, path: str) -> str | None:
        """A short text of run.json by its dotted path, on one line."""
        return text(self.at(path))

    @property
    def foreign(self) -> bool:
        """Whether another trainer wrote it: there is no run.json."""
        return not self.record

    def series(self, name: str) -> Series:
        """The values of a metric (`tags.Metric.name`), under its tag or its earlier names; empty if not recorded."""
        if name not in self._series:
            metric = tags.BY_NAME[name]
            known = [self.scalars[tag] for tag in (*reversed(metric.also), metric.tag) if tag in self.scalars]
            self._series[name] = functools.reduce(events.join, known, events.empty())
        return self._series[name]

    @functools.cached_property
    def _series(self) -> dict[str, Series]:
        return {}

    # --- what kind of run ---------------------------------------------------------------------------------------

    @functools.cached_property
    def world_size(self) -> int | None:
        """Number of ranks."""
        return count(self.at("world_size")) or (self.ranks.world_size if self.ranks is not None else None)

    @property
    def context_parallel(self) -> int:
        """Ranks that share each row."""
        return count(self.at("config.training.context_parallel")) or 1

    @functools.cached_property
    def on_gpus(self) -> bool:
        """Whether it ran on GPUs, as far as is recorded."""
        device = self.text("hardware.device")
        if device is not None:
            return device != "cpu"
        about = self.ranks.about if self.ranks is not None else []
        return any(one["gpu"] is not None for one in about)

    @property
    def hardware(self) -> str | None:
        """Name of the GPU or the processor."""
        return self.text("hardware.name") or next(
            (one["device"] for one in (self.ranks.about if self.ranks is not None else []) if one["device"]), None
        )

    @functools.cached_property
    def model_id(self) -> str:
        """Tells models apart whose losses cannot be compared: fingerprint of the weights, else the name; "" if neither
        is recorded."""
        weights = text(mapping(self.at("settings")).get("base weights"))
        return weights or self.text("config.model.model_name_or_path") or ""

    @functools.cached_property
    def resumed_at(self) -> int | None:
        """The step after which this process went on, of a resumed run: times of run.json begin there."""
        found = re.search(r"checkpoint-(\d{1,12})/?$", self.text("resumed_from") or "")
        return int(found.group(1)) if found else None

    @functools.cached_property
    def began(self) -> float | None:
        """When the first step that counts was recorded, in seconds since the epoch."""
        return min(self._times, default=None)

    @functools.cached_property
    def ended(self) -> float | None:
        """When the last value was recorded, in seconds since the epoch."""
        return max(self._times, default=None)

    @functools.cached_property
    def _times(self) -> list[float]:
        """Ends of what was recorded when."""
        known = [one.times for one in self.scalars.values() if len(one)]
        known += [self.ranks.times] if self.ranks is not None and len(self.ranks.times) else []
        finite = [times[np.isfinite(times) & (times > 0)] for times in known]
        return [float(end) for times in finite if len(times) for end in (times.min(), times.max())]

    @functools.cached_property
    def steps(self) -> int | None:
        """Optimizer steps that are complete."""
        known = [count(self.at("steps")) or 0, int(self.ranks.steps[-1]) if self.ranks is not None else 0]
        losses = self.series("loss")
        known.append(int(losses.steps[-1]) if len(losses) else 0)
        return max(known) or None

    @functools.cached_property
    def status(self) -> str:
        """done, failed, interrupted, running, ended without a record (such as by SIGKILL), or not recorded."""
        status = self.text("status")
        if status in ("done", "failed", "interrupted"):
            return status
        if status is None and self.foreign:
            return "not recorded"
        newest = max((float(one.times[-1]) for one in self.scalars.values() if len(one)), default=0.0)
        longest = 0.0
        if self.ranks is not None:
            times = self.ranks.times[np.isfinite(self.ranks.times)]
            newest = max(newest, float(times[-1]) if len(times) else 0.0)
            longest = float(np.max(np.diff(times), initial=0.0))
        return "running" if self.now - newest < max(SILENT_SECONDS, 3 * longest) else "ended without a record"

    # --- typical values -----------------------------------------------------------------------------------------

    @property
    def warm_up(self) -> int:
        """Steps at the beginning that typical values leave out."""
        return WARM_UP if (self.steps or 0) > SHORT else 1

    def typical(self, name: str) -> float | None:
        """What run.json says, as the end of the run and its prediction do; else the median of a metric over the records
        that lie after the warm-up, or over all if none does."""
        if (recorded := self.number(_RECORDED.get(name, ""))) is not None:
            return recorded * ((self.world_size or 1) if name == "tokens_total" else 1)
        series = self.series(name).finite()
        if self.ranks is not None:  # a record that begins in the warm-up is left out
            begun = {int(step) for step, kept in zip(self.ranks.steps, self.ranks.typical(), strict=True) if kept}
            kept = np.array([int(step) in begun for step in series.steps], bool)
        else:
            kept = series.steps > self.warm_up
        return events.finite_median(series.values[kept] if kept.any() else series.values)

    def phase(self, name: str) -> np.ndarray:
        """float64 [records, ranks]: seconds of "step", a phase or "own_work" in a typical step of each record; without
        ranks.jsonl none."""
        return self.ranks.column(name) if self.ranks is not None else np.empty((0, 0))

    @functools.cached_property
    def step_seconds(self) -> float | None:
        """Median step time, evaluation and saving excluded."""
        if (recorded := self.number("step_seconds_median")) is not None:
            return recorded
        return events.finite_median(self.phase("step"))


# --- from a folder ----------------------------------------------------------------------------------------------------


def read(folder: Path, now: float | None = None) -> Run:
    """The run in a folder: its output folder, that folder's `runs`, or a folder with event files.

    Args:
        now: seconds since the epoch, to judge whether it still runs.

    Raises:
        UserError: there is no run in this folder, or several.
    """
    if not folder.is_dir():
        raise UserError(f"no run: `{folder}` is not a folder. Give the training.output_dir of a run.")
    try:
        output = _output_of(folder)
        files = _event_files(folder, output)
        if output is None and not files:
            raise UserError(_no_run(folder))
        record, problem = json_object(output / RUN_FILE) if output is not None else ({}, None)
        problems = [problem] if problem else []
        if len(files) > MOST_FILES:
            problems.append(f"It has {len(files)} event files, of which the newest {MOST_FILES} were read.")
        home = output or folder
        hang, problem = json_object(home / HANG_FILE)
        problems += [problem] if problem else []
        loss = tags.BY_NAME["loss"]
        return Run(
            folder=folder,
            name=_name(folder, output),
            output=output,
            record=record,
            scalars=events.read(files[-MOST_FILES:], (loss.tag, *loss.also)),
            ranks=_ranks(folder, output),
            hang=hang or None,
            hang_time=(home / HANG_FILE).stat().st_mtime if hang else None,
            problems=tuple(problems),
            now=time.time() if now is None else now,
        )
    except OSError as error:
        raise UserError(f"the run in {folder} cannot be read: {error.strerror or error}. Check its files.") from error


def is_run(folder: Path) -> bool:
    """Whether `read` finds a run there."""
    output = _output_of(folder)
    return output is not None or bool(folder.is_dir() and _event_files(folder, output))


def _ranks(folder: Path, output: Path | None) -> Ranks | None:
    places = [folder, folder.parent] if output is None else [output / "runs", output, folder]
    file = next((place / RANKS_FILE for place in places if (place / RANKS_FILE).is_file()), None)
    return rank_records.read(file) if file is not None else None


def _output_of(folder: Path) -> Path | None:
    """The output folder that a folder is, or is the `runs` of, or a folder in that."""
    here = folder.absolute()
    candidates = [here]
    if here.name == "runs":
        candidates.append(here.parent)
    if here.parent.name == "runs":
        candidates.append(here.parent.parent)
    return next((one for one in candidates if (one / RUN_FILE).is_file()), None)


def _event_files(folder: Path, output: Path | None) -> list[Path]:
    if output is not None:
        return _files_below(output / "runs") + _files_in(output)
    return _files_in(folder) or _files_below(folder / "runs") or (_files_below(folder) if folder.name == "runs" else [])


def _files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(events.PATTERN) if path.is_file()) if folder.is_dir() else []


def _files_below(folder: Path) -> list[Path]:
    return sorted(file for parent in _folders(folder, MOST_DEPTH) for file in _files_in(parent))


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    """A folder and those below it, without hidden ones, links and checkpoints."""
    if not folder.is_dir():
        return
    yield folder
    if depth:
        for below in sorted(folder.iterdir()):
            skipped = below.name.startswith((".", "checkpoint-")) or below.is_symlink()
            if not skipped and below.is_dir():
                yield from _folders(below, depth - 1)


def find(folder: Path) -> list[Path]:
    """The runs in a folder and below it: output folders, and folders with the events of other trainers."""
    found: list[Path] = []
    for below in _folders(folder, MOST_DEPTH):
        if any(below.is_relative_to(run) for run in found):
            continue
        # TRL's output folder has events in `runs` or in folders in that, which are its starts.
        of_trl = below.name != "runs" and _files_below(below / "runs") and not list(below.glob(f"runs/*/{RUN_FILE}"))
        if (below / RUN_FILE).is_file() or _files_in(below) or of_trl:
            found.append(below)
    return found


@dataclass(frozen=True)
class Found:
    """A run in a folder of runs: `read` reads `folder`."""

    folder: Path
    name: str  # of the run in TensorBoard: the folder of its event files, relative to the log folder
    state: tuple[tuple[str, int, int], ...]  # path, size and time of change (ns) of each file that a review reads

    @property
    def changed(self) -> int:
        """When the run last wrote anything, in nanoseconds since 1970."""
        return max((time for _, _, time in self.state), default=0)


def newest_first(root: Path) -> list[Found]:
    """All runs below a folder; the last to write comes first."""
    return sorted((_look(folder, root) for folder in find(root)), key=lambda run: (-run.changed, run.name))


def _look(folder: Path, root: Path) -> Found:
    written = sorted([*folder.glob(events.PATTERN), *(folder / "runs").rglob(events.PATTERN)])
    state = []
    for path in [*written, *(folder / name for name in (RUN_FILE, f"runs/{RANKS_FILE}", RANKS_FILE, HANG_FILE))]:
        try:
            stat = path.stat()
        except OSError:  # not written, or removed meanwhile
            continue
        state.append((str(path), stat.st_size, stat.st_mtime_ns))
    name = os.path.relpath(written[0].parent if written else folder, root).replace(os.sep, "/")
    return Found(folder, name, tuple(state))


def _name(folder: Path, output: Path | None) -> str:
    path = (output or folder).absolute()
    if output is None and path.name == "runs":
        path = path.parent
    return text(path.name) or "run"


def _no_run(folder: Path) -> str:
    below = find(folder)
    if below:
        names = ", ".join(str(path) for path in below[:3])
        return f"no run: `{folder}` holds {counted(len(below), 'run')}, such as {names}. Give the folder of a run."
    return f"no run: `{folder}` has neither {RUN_FILE} nor event files. Give the training.output_dir of a run."
