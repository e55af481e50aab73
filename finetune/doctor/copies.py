"""Whether bytes that one GPU sends to another arrive as they were."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.errors import describe

BYTES = 16 << 20  # of one copy
REMEDY = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"  # PCI Access Control Services


@dataclass(frozen=True)
class Copied:
    """One copy. `wrong` bytes did not arrive as they were sent; None: it failed, for the reason `error`."""

    source: str
    target: str
    sent: int
    wrong: int | None
    error: str | None = None


def compare(devices: Sequence[str], send: Callable[[str, str, Any], Any] | None = None) -> list[Copied]:
    """Copy the same random bytes between the devices of every pair, in both directions, and count those that differ.

    Args:
        devices: as torch names them, such as `cuda:0`.
        send: takes source, target and a uint8 tensor on the host; returns what arrived, on the host.
    """
    import torch

    sent = torch.randint(256, (BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = []
    for source, target in itertools.permutations(devices, 2):
        try:
            wrong = int((sent != (send or through_torch)(source, target, sent)).sum())
            found.append(Copied(source, target, BYTES, wrong))
        except Exception as error:  # whatever a driver raises is the answer
            found.append(Copied(source, target, BYTES, None, describe(error)))
    return found


def through_torch(source: str, target: str, sent: Any) -> Any:
    """What arrives on `target`, whose memory holds other bytes before: a copy that does nothing is found."""
    there = (255 - sent).to(target)
    there.copy_(sent.to(source))
    return there.cpu()
