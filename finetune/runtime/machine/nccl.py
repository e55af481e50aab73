"""Recommends NCCL environment variables for the hardware that `hardware.survey()` found, each with its reason.

NCCL tunes itself, so a variable is only set if the topology is known to make NCCL's own choice fail. Meaning, defaults
and allowed values: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune.runtime.machine.hardware import Hardware
from finetune.runtime.machine.nvml import NVLINK


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One environment variable."""

    name: str
    value: str
    reason: str


NO_MULTICAST = Setting(
    name="NCCL_NVLS_ENABLE",
    value="0",
    reason="NVLink SHARP needs multicast memory, which fails at startup in many containers and virtual machines; Ring "
    "and Tree over NVLink do not need it, and adapter gradients are too small to benefit from it",
)
NO_PEERS = Setting(
    name="NCCL_P2P_DISABLE",
    value="1",
    reason="no pair of GPUs has peer access: traffic goes through host memory anyway, and drivers that wrongly claim "
    "peer access behind a host bridge (ACS, IOMMU) hang",
)


def recommend_settings(hardware: Hardware) -> tuple[Setting, ...]:
    """The variables to set before the ranks start; empty if NCCL's defaults are right.

    Args:
        hardware: from `survey()`. Unknown links lead to no setting.
    """
    links = hardware.links or ()
    if links and all(link.kind == NVLINK for link in links):
        return (NO_MULTICAST,)
    if links and all(link.peer_access is False for link in links):
        return (NO_PEERS,)
    return ()
