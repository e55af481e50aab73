"""A dry run on a device of as many rows as $FITS, full above $FULL: both counted in rows of a micro-batch."""

from __future__ import annotations

import os
import sys
from typing import Any

from finetune.measure import held, longest_row
from tests.spies import train_with


class Memory:
    """That a row takes a GiB of."""

    def __init__(self, fits: int) -> None:
        self.limit_bytes, self.rows = fits * 2**30, 0

    def reset(self) -> None:
        """Forget the peak."""
        self.rows = 0

    def peak_bytes(self) -> int:
        """Since the last reset."""
        return self.rows * 2**30


def main() -> int:
    """Dry run with the arguments of this program."""
    import torch

    memory, full = Memory(int(os.environ["FITS"])), int(os.environ["FULL"])

    def no_room(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    def watch(trainer: Any) -> None:
        step = trainer.training_step

        def training_step(model: Any, inputs: Any, *others: Any) -> Any:
            memory.rows = max(memory.rows, len(inputs["input_ids"]))
            if memory.rows > full:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return step(model, inputs, *others)

        trainer.training_step = training_step

    if full == 0:
        torch.optim.AdamW.step = no_room
    held.Memory = lambda device: memory
    longest_row.SHORT_TOKENS = 16  # memory counts rows, not tokens
    return train_with(watch)


if __name__ == "__main__":
    sys.exit(main())
