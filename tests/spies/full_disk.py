"""Fill the disk of the output folder before step 4."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

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


if __name__ == "__main__":
    sys.exit(train_with(fill))
