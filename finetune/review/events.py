"""Scalars of TensorBoard event files, whoever wrote them.

A file is a sequence of records: length (8 bytes, little endian), its checksum (4), a serialized `Event`, its checksum
(4). Checksums are not verified: in Python that would take longer than everything else together. A length that does not
fit into the rest of the file ends the file, as an interrupted write does.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from finetune.runtime.files import open_regular

PATTERN = "*tfevents*"
_HEADER = struct.Struct("<Q")
_STARTED = 1  # SessionLog.START: a writer with `purge_step` takes back what was written from that step on


@dataclass(frozen=True, eq=False)
class Series:
    """The values of one tag: steps strictly ascending."""

    steps: np.ndarray  # int64 [n]
    values: np.ndarray  # float64 [n], NaN and infinity as written
    times: np.ndarray  # float64 [n], seconds since the epoch

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float | None:
        """The newest finite value."""
        finite = self.finite().values
        return float(finite[-1]) if len(finite) else None

    @property
    def highest(self) -> float | None:
        """The largest finite value."""
        return max(self.finite().values.tolist(), default=None)

    def after(self, step: int) -> Series:
        """The part with steps above `step`."""
        return self.part(slice(int(np.searchsorted(self.steps, step, side="right")), None))

    def finite(self) -> Series:
        """The part without NaN and infinity."""
        return self.part(np.isfinite(self.values))

    def part(self, kept: slice | np.ndarray) -> Series:
        """What a slice, a mask or indices select."""
        return Series(self.steps[kept], self.values[kept], self.times[kept])


def empty() -> Series:
    """A series without values."""
    return Series(np.empty(0, np.int64), np.empty(0), np.empty(0))


def of(steps: Sequence[int], values: Sequence[float], times: Sequence[float] | None = None) -> Series:
    """A series from plain lists; of several values of a step the last counts."""
    numbers = np.asarray(values, np.float64)
    when = np.zeros(len(numbers)) if times is None else np.asarray(times, np.float64)
    return _once(Series(np.asarray(steps, np.int64), numbers, when))


def read(files: Sequence[Path], training: Sequence[str]) -> dict[str, Series]:
    """The scalars of a run by tag.

    Files are taken in the order in which they were begun. A later file of the same run replaces what earlier ones
    hold from its first training step on: it was resumed there. A file without training steps, such as one of an
    evaluation, only adds.

    Args:
        training: tags that are written by training steps alone, such as the loss.

    Raises:
        OSError: a file cannot be read.
    """
    merged: dict[str, Series] = {}
    for _, _, scalars in sorted((_began(file), str(file), _read_one(file)) for file in files):
        firsts = [int(scalars[tag].steps[0]) for tag in training if tag in scalars]
        if firsts:
            merged = {tag: one.part(one.steps < min(firsts)) for tag, one in merged.items()}
        for tag, one in scalars.items():
            merged[tag] = join(merged[tag], one) if tag in merged else one
    return {tag: one for tag, one in merged.items() if len(one)}


def join(earlier: Series, later: Series) -> Series:
    """Both; at a step that both have, `later` counts."""
    return _once(
        Series(
            np.concatenate([earlier.steps, later.steps]),
            np.concatenate([earlier.values, later.values]),
            np.concatenate([earlier.times, later.times]),
        )
    )


def _once(series: Series) -> Series:
    """In the order of steps; of several values of a step the last one written."""
    order = np.argsort(series.steps, kind="stable")
    steps = series.steps[order]
    return series.part(order[np.append(steps[1:] != steps[:-1], True)] if len(steps) else order)


def _began(file: Path) -> float:
    """When a file was begun, by its first event; by its name if it has none."""
    if (first := next(_events(file), None)) is not None:
        return float(first.wall_time)
    named = re.search(r"tfevents\.(\d{1,12})", file.name)
    return float(named.group(1)) if named else 0.0


def records(stream: IO[bytes]) -> Iterator[bytes]:
    """The payloads of an open file, to its end or to where it is damaged."""
    size = stream.seek(0, 2)
    position = stream.seek(0)
    while len(header := stream.read(12)) == 12:
        length = _HEADER.unpack_from(header)[0]
        position += 16 + length
        if length == 0 or position > size:  # zeros are what a file system may leave after a crash
            return
        payload = stream.read(length + 4)
        if len(payload) < length + 4:  # the file has been cut meanwhile
            return
        yield payload[:length]


def _events(file: Path) -> Iterator[Any]:
    """The events of a file that are not damaged."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    parse = Event.FromString
    with open_regular(file) as stream:
        for payload in records(stream):
            try:
                event = parse(payload)
            except DecodeError:
                continue
            yield event


def _read_one(file: Path) -> dict[str, Series]:
    """The scalars of one file by tag."""
    found: dict[str, tuple[array, array, array]] = {}
    for event in _events(file):
        if not event.HasField("summary"):
            if event.HasField("session_log") and event.session_log.status == _STARTED:
                _purge(found, event.step)
            continue
        for value in event.summary.value:
            if not value.HasField("simple_value"):  # text, a histogram or a picture
                continue
            columns = found.get(value.tag)
            if columns is None:
                columns = found[value.tag] = (array("q"), array("d"), array("d"))
            columns[0].append(event.step)
            columns[1].append(value.simple_value)
            columns[2].append(event.wall_time)
    return {tag: of(*columns) for tag, columns in found.items()}


def finite_median(values: np.ndarray) -> float | None:
    """Median of the finite values; None if there are none."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else None


def _purge(found: dict[str, tuple[array, array, array]], step: int) -> None:
    """Drop what was written for this step and later ones."""
    for tag, columns in found.items():
        kept = np.frombuffer(columns[0], np.int64) < step
        found[tag] = tuple(  # pyright: ignore[reportArgumentType]
            array(column.typecode, np.frombuffer(column, column.typecode)[kept].tobytes()) for column in columns
        )
