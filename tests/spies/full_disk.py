"""Fill the disk of the output folder before step 4. Every rank of a sharded model writes several files."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

from finetune.engine.checkpoint import tensor_files
from tests.spies import train_with


def fill(trainer: Any) -> None:
    """Write 64 MiB beside the output folder, or as much as there is room for."""
    step = type(trainer).training_step

    def training_step(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if self.state.global_step == 3:
            with contextlib.suppress(OSError):
                (Path(self.args.output_dir).parent / "filler").write_bytes(b"x" * 2**26)
        return step(self, *arguments, **keywords)

    type(trainer).training_step = training_step
    tensor_files.FILE_BYTES, tensor_files.ONE_FILE_BYTES = 40_000, 0


if __name__ == "__main__":
    sys.exit(train_with(fill))
