"""Train with passes that are recorded and replayed, by running them again: a CPU has no graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tests.spies import train_with


class RunsAgain:
    """In place of `decoder_graphs.CudaRecorder`."""

    def warm_up(self, function: Callable[[], None]) -> None:
        """Run it."""
        function()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """What runs it again, with gradients, without which autograd calls it."""
        import torch

        return torch.enable_grad()(function)


def watch(trainer: object) -> None:
    """Have the passes recorded."""
    from finetune.engine.training import decoder_graphs

    decoder_graphs.why_not = lambda trainer: None
    decoder_graphs.CudaRecorder = RunsAgain  # type: ignore[assignment,misc]


if __name__ == "__main__":
    sys.exit(train_with(watch))
