"""Programs that train as the shipped command does and watch or break one thing, by the hook of a user's script."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from finetune import train
from finetune.config import load
from finetune.runtime.command import run_guarded
from finetune.runtime.hooks import Hooks


def train_with(trainer: Callable[[Any], None]) -> int:
    """`finetune.train` with the arguments of this program; `trainer` gets the trainer after it is built."""
    return run_guarded(lambda: train.run(load(sys.argv[1:], command="train"), hooks=Hooks(trainer=trainer)))
