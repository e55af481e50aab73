"""Programs that train as the shipped command does and watch or break one thing of the trainer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from finetune import train
from finetune.config import load
from finetune.engine.session import building
from finetune.runtime.command import run_guarded


def give_trainer_to(watch: Callable[[Any], object]) -> None:
    """Have each trainer of this process passed to `watch` after it is built."""
    build = building.build_trainer

    def build_trainer(*args: Any, **kwargs: Any) -> building.BuiltTrainer:
        built = build(*args, **kwargs)
        watch(built.trainer)
        return built

    building.build_trainer = build_trainer


def train_with(trainer: Callable[[Any], None]) -> int:
    """`finetune.train` with the arguments of this program; `trainer` gets the trainer after it is built."""
    give_trainer_to(trainer)
    return run_guarded(lambda: train.run(load(sys.argv[1:], command="train")))
