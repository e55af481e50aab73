"""Write after each micro-batch where the gradients of this rank are: held-WORLD-RANK.txt in the working directory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from finetune.runtime.ranks import distributed
from tests.spies import train_with


def watch(trainer: Any) -> None:
    """Look after each `training_step`."""
    step = trainer.training_step

    def training_step(model: Any, *rest: Any) -> Any:
        loss = step(model, *rest)
        held = {parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()}
        with Path(f"held-{distributed.ranks().world_size}-{distributed.ranks().rank}.txt").open("a") as file:
            file.write(f"{sorted(held)}\n")
        return loss

    trainer.training_step = training_step


if __name__ == "__main__":
    sys.exit(train_with(watch))
