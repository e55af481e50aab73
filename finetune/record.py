"""run.json: what a run was, what it did and how it ended. Written whole or not at all, by rank 0."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from finetune import disk, distributed
from finetune.redact import redact_tree

FILE_NAME = "run.json"


class RunRecord:
    """The growing content of run.json. Every rank may call `update`; only rank 0 has a file."""

    def __init__(self, output_dir: Path) -> None:
        self.path = output_dir / FILE_NAME
        self.content: dict[str, Any] = {}

    def update(self, **values: Any) -> None:
        """Set top-level fields and write the file."""
        self.content.update(values)
        if distributed.ranks().is_main:
            write_json(self.path, redact_tree(self.content))

    def try_update(self, **values: Any) -> None:
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
            sys.stderr.write(f"warning: {warning}\n")

    def fail(self, message: str) -> None:
        """Note why the run failed, where it had begun; a full disk does not hide the failure behind its own."""
        if self.content:
            with contextlib.suppress(OSError):
                self.update(status="failed", error=message)


def write_json(path: Path, content: Any) -> None:
    """Write `content` to a temporary file beside `path`, then rename: a reader sees the old file or the new one.

    Numbers that JSON has no word for (NaN, infinity) become null.

    Raises:
        OSError: the disk cannot take it; `filename` is `path`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(_plain(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        error.filename = str(path)  # the file that was asked for; a failed write names none
        raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    if hasattr(value, "item"):  # numpy and torch scalars
        return _plain(value.item())
    return str(value)
