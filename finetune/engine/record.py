"""run.json: what a run was, what it did and how it ended. Written whole or not at all, by rank 0."""

from __future__ import annotations

import contextlib
from pathlib import Path

from finetune.redact import redact_tree
from finetune.runtime.command import warn
from finetune.runtime.files import write_json
from finetune.runtime.machine import disk
from finetune.runtime.ranks import distributed
from finetune.runtime.types import JsonObject

FILE_NAME = "run.json"
CONFIGURATION = "run.yaml"


class RunRecord:
    """The growing content of run.json. Every rank may call `update`; only rank 0 has a file."""

    def __init__(self, output_dir: Path) -> None:
        self.path = output_dir / FILE_NAME
        self.content: JsonObject = {}

    def update(self, **values: object) -> None:
        """Set top-level fields and write the file."""
        self.content.update(values)
        if distributed.ranks().is_main:
            write_json(self.path, redact_tree(self.content))

    def try_update(self, **values: object) -> None:
        """`update`, where a disk that cannot take the file must not end the training: a warning, and the next update
        tries again."""
        try:
            self.update(**values)
        except OSError as error:
            why = disk.reason(error)
            if why is None:
                raise
            warning = f"{why}: {self.path} was not updated."
            self.content.setdefault("warnings", []).append(warning)
            warn(warning)

    def fail(self, message: str, *, interrupted: bool = False, in_place_of_main: bool = False) -> None:
        """Note why the run failed, where it had begun; a full disk does not hide the failure behind its own.

        Args:
            interrupted: it was stopped, and `message` says by what.
            in_place_of_main: rank 0 does not answer, and this rank writes the file.
        """
        if self.content:
            with contextlib.suppress(OSError):
                fields = ("interrupted", "interrupted_by") if interrupted else ("failed", "error")
                self.update(**{"status": fields[0], fields[1]: message})
                if in_place_of_main:
                    write_json(self.path, redact_tree(self.content))
