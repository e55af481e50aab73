"""The runs below TensorBoard's log folder, and whether any of their files has changed since the last look."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from finetune.review import run as runs
from finetune.review.events import PATTERN

BESIDE_EVENTS = (runs.RUN_FILE, f"runs/{runs.RANKS_FILE}", runs.RANKS_FILE, runs.HANG_FILE)


@dataclass(frozen=True)
class Found:
    """A run: `finetune.review` reads `folder`."""

    folder: Path
    name: str  # of the run in TensorBoard: the folder of its event files, relative to the log folder
    state: tuple[tuple[str, int, int], ...]  # path, size and time of change (ns) of each file that a review reads

    @property
    def changed(self) -> int:
        """When the run last wrote anything, in nanoseconds since 1970."""
        return max((time for _, _, time in self.state), default=0)


def find_runs(root: Path) -> list[Found]:
    """All runs below a folder; the last to write comes first."""
    found = [_look(folder, root) for folder in runs.find(root)]
    return sorted(found, key=lambda run: (-run.changed, run.name))


def _look(folder: Path, root: Path) -> Found:
    events = sorted([*folder.glob(PATTERN), *(folder / "runs").rglob(PATTERN)])
    state = []
    for path in [*events, *(folder / name for name in BESIDE_EVENTS)]:
        try:
            stat = path.stat()
        except OSError:  # not written, or removed meanwhile
            continue
        state.append((str(path), stat.st_size, stat.st_mtime_ns))
    name = os.path.relpath(events[0].parent if events else folder, root).replace(os.sep, "/")
    return Found(folder, name, tuple(state))
