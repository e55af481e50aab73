"""Fail in step $FAULT_STEP on rank $FAULT_RANK, or on "all" of them: $FAULT is `raise`, `nan` (weights), `bit` (of one
weight), `state` (a bit of an optimizer state), `none` or the name of a signal."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from tests.spies import train_with


def break_step(trainer: Any) -> None:
    """Put the fault before the step's own work."""
    kind, rank, step = os.environ["FAULT"], os.environ["FAULT_RANK"], int(os.environ["FAULT_STEP"])
    healthy = type(trainer).training_step

    def training_step(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if rank in (os.environ.get("RANK", "0"), "all") and self.state.global_step == step:
            if kind == "raise":
                raise ValueError("the fault of this test")
            if kind == "nan":
                for parameter in self.model.parameters():
                    parameter.data.fill_(float("nan"))
            elif kind in ("bit", "state"):
                import torch

                weight = next(one for one in self.model.parameters() if one.requires_grad)
                flipped = weight.data if kind == "bit" else self.optimizer.state[weight]["exp_avg"]
                flipped.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)
            elif kind != "none":
                os.kill(os.getpid(), getattr(signal, kind))
        return healthy(self, *arguments, **keywords)

    type(trainer).training_step = training_step


if __name__ == "__main__":
    sys.exit(train_with(break_step))
