"""Plant $FAULT into a run, for `tests.review.record`; a fault of one rank into that of $FAULT_RANK."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from finetune.runtime.ranks import distributed
from tests.spies import train_with

SECONDS = float(os.environ.get("FAULT_SECONDS", "0.05"))  # of each micro-batch
STEPS = [int(step) for step in os.environ.get("FAULT_STEPS", "").split(",") if step]


def slow_loader(trainer: Any) -> None:
    """Collating takes SECONDS."""
    collate = trainer.collate_rows

    def slow(rows: Any) -> Any:
        if trainer.model.training:
            time.sleep(SECONDS)
        return collate(rows)

    trainer.collate_rows = slow


def slow_compute(trainer: Any) -> None:
    """The forward pass takes SECONDS longer."""
    trainer.model.register_forward_pre_hook(lambda *_: time.sleep(SECONDS) if trainer.model.training else None)


def frozen(trainer: Any) -> None:
    """No gradient reaches a weight."""
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient * 0)


def spikes(trainer: Any) -> None:
    """The rows of STEPS have random labels."""
    import torch

    step = trainer.training_step

    def training_step(model: Any, inputs: Any, *rest: Any) -> Any:
        if trainer.state.global_step + 1 in STEPS:
            labels = inputs["labels"]
            random = torch.randint_like(labels, 3, 300)
            inputs["labels"] = torch.where(labels == -100, labels, random)
        return step(model, inputs, *rest)

    trainer.training_step = training_step


def not_finite(trainer: Any) -> None:
    """The weights become NaN before STEPS."""
    step = trainer.training_step

    def training_step(model: Any, *rest: Any) -> Any:
        if trainer.state.global_step + 1 in STEPS:
            for parameter in model.parameters():
                parameter.data.fill_(float("nan"))
        return step(model, *rest)

    trainer.training_step = training_step


FAULTS: dict[str, Callable[[Any], None]] = {
    "none": lambda trainer: None,
    "slow loader": slow_loader,
    "slow compute": slow_compute,
    "frozen": frozen,
    "spikes": spikes,
    "not finite": not_finite,
}


def plant(trainer: Any) -> None:
    """Plant the fault, on all ranks or on one."""
    rank = os.environ.get("FAULT_RANK")
    if rank is None or int(rank) == distributed.ranks().rank:
        FAULTS[os.environ["FAULT"]](trainer)


if __name__ == "__main__":
    sys.exit(train_with(plant))
