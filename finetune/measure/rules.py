"""Rules of thumb for the number of GPUs, for where nothing can be measured. Pure.

`study2025` is what a published study draws from its measurements (TensorFlow 2.19, NCCL 2.18.5, two RTX 4070 Ti SUPER
behind a PCIe host bridge without peer access, dense models of 258 K and 6.9 M parameters, all of them trained). It
stands for that kind of machine. An adapter's gradients are a hundredth of its model's, and NVLink is fifty times such a
bridge: what is measured outranks it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EFFICIENCY_TO_JUSTIFY = 0.7  # below, a second GPU does not pay for itself
MEMORY_MARGIN = 0.8  # share of a GPU's memory to plan with

Verdict = Literal["one GPU", "evaluate", "measure", "several GPUs"]


@dataclass(frozen=True, kw_only=True)
class Ruling:
    """What a rule set says, and by which of its rules."""

    verdict: Verdict
    reason: str

    @property
    def several(self) -> bool:
        """Whether it asks for several GPUs without a measurement."""
        return self.verdict == "several GPUs"


def study2025(parameters: int | None, global_batch_size: int, efficiency: float | None = None, gpus: int = 2) -> Ruling:
    """One GPU or several, by the size of the model and of the batch.

    Args:
        parameters: of the model; None if unknown.
        global_batch_size: rows of an optimizer step over all GPUs.
        efficiency: speed-up over the number of GPUs, estimated or measured; None if there is no estimate.
        gpus: the number of GPUs there are.
    """
    if gpus < 2:
        return Ruling(verdict="one GPU", reason="no second GPU is available")
    if parameters is None:
        return Ruling(verdict="measure", reason="the number of parameters is not known")
    size = f"{parameters / 1e6:,.3g} M parameters"
    if parameters < 1_000_000:
        return Ruling(verdict="one GPU", reason=f"{size}: under 1 M never several")
    if parameters < 5_000_000:
        if global_batch_size >= 128 and efficiency is not None and efficiency > 0.6:
            return Ruling(
                verdict="evaluate",
                reason=f"{size}: 1 to 5 M, with a batch of {global_batch_size} and efficiency {efficiency:.0%}",
            )
        return Ruling(
            verdict="one GPU",
            reason=f"{size}: 1 to 5 M prefer one (15 to 25 % are lost), but for batches of 128 and more with an "
            "efficiency above 60 %",
        )
    if parameters < 10_000_000:
        return Ruling(verdict="measure", reason=f"{size}: 5 to 10 M, case by case; a benchmark is required")
    if global_batch_size >= 64:
        clear = ", above 50 M with clear gains" if parameters > 50_000_000 else ""
        return Ruling(
            verdict="several GPUs", reason=f"{size} and a batch of {global_batch_size}: 10 M and 64 or more{clear}"
        )
    return Ruling(verdict="measure", reason=f"{size} with a batch of {global_batch_size}: the rules begin at 64 there")
