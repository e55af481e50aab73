"""Train with weights and optimizer state in files of at most 40 kB, so that every rank writes several."""

from __future__ import annotations

import sys

from finetune.engine.checkpoint import tensor_files
from tests.spies import train_with


def main() -> int:
    """As `finetune.train.main`."""
    tensor_files.FILE_BYTES, tensor_files.ONE_FILE_BYTES = 40_000, 0
    return train_with(lambda trainer: None)


if __name__ == "__main__":
    sys.exit(main())
