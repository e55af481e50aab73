"""TensorBoard's event file of a run, and ranks.jsonl beside it. A disk that fails costs events, never the training."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from finetune.runtime import files
from finetune.runtime.command import warn
from finetune.runtime.machine import disk
from finetune.runtime.types import JsonObject


class EventFile:
    """TensorBoard's event file, made at the first write. If the disk fails it warns once and drops all further events:
    the training and its checkpoints do not depend on it."""

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        """
        Args:
            folder: its name is the name of the run in TensorBoard.
            purge_step: events of earlier files of the folder count only before this step; for a resumed run.
        """
        self.folder = folder
        self._purge_step = purge_step
        self._writer: SummaryWriter | None = None
        self.warning: str | None = None  # why events were dropped

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """As SummaryWriter.add_scalar."""
        self._write("add_scalar", tag, value, step)

    def add_text(self, tag: str, text: str, step: int) -> None:
        """As SummaryWriter.add_text."""
        shown = text.encode(errors="backslashreplace").decode()  # a file's name may be no text
        self._write("add_text", tag, shown, step)

    def add_histogram(self, tag: str, values: object, step: int) -> None:
        """As SummaryWriter.add_histogram."""
        self._write("add_histogram", tag, values, step)

    def add_custom_scalars(self, layout: dict[str, dict[str, list[object]]]) -> None:
        """As SummaryWriter.add_custom_scalars."""
        self._write("add_custom_scalars", layout)

    def close(self) -> None:
        """Write what is pending and close the file."""
        if self._writer is not None:
            with self._dropping():
                self._writer.close()
            self._writer = None

    def _write(self, method: str, *arguments: object) -> None:
        if self.warning is not None:
            return
        with self._dropping():
            if self._writer is None:
                _quiet_event_thread()
                self._writer = SummaryWriter(str(self.folder), purge_step=self._purge_step)
            getattr(self._writer, method)(*arguments)

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # of its background thread, too: it surfaces at a later write
            why = disk.reason(error)
            if why is None:
                raise
            self._writer = None
            if self.warning is None:
                self.warning = f"{why}: TensorBoard's events in {self.folder} are incomplete."
                warn(f"{self.warning} The training continues without TensorBoard.")


def _quiet_event_thread() -> None:
    """Keep Python from printing the traceback of a disk error in the thread that writes events."""
    previous = threading.excepthook
    if getattr(previous, "of_event_files", False):
        return

    def hook(args: threading.ExceptHookArgs) -> None:
        of_writer = type(args.thread).__name__ == "_AsyncWriterThread"
        if not (of_writer and args.exc_value is not None and disk.reason(args.exc_value)):
            previous(args)

    hook.of_event_files = True  # pyright: ignore[reportFunctionMemberAccess]
    threading.excepthook = hook


class RankLog:
    """ranks.jsonl: one line per record with what each rank did, for `finetune review`. Appended by rank 0."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed = False

    def append(self, line: JsonObject) -> None:
        """Add a line. A disk that cannot take it ends the log; the event file has warned by then, or will."""
        if self._failed:
            return
        try:
            files.append_text(self._path, json.dumps(line) + "\n")
        except OSError as error:
            if disk.reason(error) is None:
                raise
            self._failed = True
