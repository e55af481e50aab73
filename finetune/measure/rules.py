"""Rules of thumb for the number of GPUs, used if nothing has been measured. Pure.

`study2025` holds the conclusions of a published study (TensorFlow 2.19, NCCL 2.18.5, two RTX 4070 Ti SUPER behind a
PCIe host bridge without peer access, dense models of 258 K and 6.9 M parameters, trained in full). It applies to that
kind of machine. An adapter's gradients are a hundredth of its model's, and NVLink is fifty times as fast as such a
bridge, so a measurement always takes precedence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EFFICIENCY_TO_JUSTIFY = 0.7  # below this, a second GPU is not worth it
MEMORY_MARGIN = 0.8  # usable share of a GPU's memory

Verdict = Literal["one GPU", "evaluate", "measure", "several GPUs"]


@dataclass(frozen=True, kw_only=True)
class Ruling:
    """The verdict of a rule set, and the rule behind it."""

    verdict: Verdict
    reason: str

    @property
    def several(self) -> bool:
        """Whether it recommends several GPUs without a measurement."""
        return self.verdict == "several GPUs"


def study2025(parameters: int | None, global_batch_size: int, efficiency: float | None = None, gpus: int = 2) -> Ruling:
    """One GPU or several, from the sizes of the model and the batch.

    Args:
        parameters: of the model; None if unknown.
        global_batch_size: rows of an optimizer step over all GPUs.
        efficiency: speed-up over the number of GPUs, estimated or measured; None if there is no estimate.
        gpus: the number of available GPUs.
    """
    if gpus < 2:
        return Ruling(verdict="one GPU", reason="no second GPU is available")
    if parameters is None:
        return Ruling(verdict="measure", reason="the number of parameters is unknown")
    size = f"{parameters / 1e6:,.3g} M parameters"
    if parameters < 1_000_000:
        return Ruling(verdict="one GPU", reason=f"{size}: one GPU below 1 M")
    if parameters < 5_000_000:
        if global_batch_size >= 128 and efficiency is not None and efficiency > 0.6:
            return Ruling(
                verdict="evaluate",
                reason=f"{size}: 1 to 5 M, with a batch of {global_batch_size} and efficiency {efficiency:.0%}",
            )
        return Ruling(
            verdict="one GPU",
            reason=f"{size}: at 1 to 5 M one is better (15 to 25% is lost), unless the batch is 128 or more with an "
            "efficiency above 60%",
        )
    if parameters < 10_000_000:
        return Ruling(verdict="measure", reason=f"{size}: at 5 to 10 M it depends; a benchmark is required")
    if global_batch_size >= 64:
        clear = ", above 50 M with clear gains" if parameters > 50_000_000 else ""
        return Ruling(
            verdict="several GPUs", reason=f"{size} and a batch of {global_batch_size}: 10 M and 64 or more{clear}"
        )
    return Ruling(
        verdict="measure", reason=f"{size} with a batch of {global_batch_size}: the rules cover batches of 64 or more"
    )
