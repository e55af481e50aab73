"""The shipped command with torchao's optimizers as they are written: compiling them takes minutes on a CPU."""

from __future__ import annotations

import sys

import torch

from finetune import train


def as_written(function=None, **_):
    """In place of `torch.compile`."""
    return function


if __name__ == "__main__":
    torch.compile = as_written
    sys.exit(train.main())
