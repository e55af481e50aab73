"""NCCL's environment for a machine, each variable with its reason: pure, from what `hardware.survey()` found.

NCCL measures and chooses by itself; a variable is set only where the topology decides against its choice. What each one
means, its default and its allowed values: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune.runtime.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One environment variable."""

    name: str
    value: str
    reason: str


NO_MULTICAST = Setting(
    name="NCCL_NVLS_ENABLE",
    value="0",
    reason="NVLink SHARP needs multicast memory, which fails at start-up in many containers and virtual machines; Ring "
    "and Tree over NVLink do without, and gradients of adapters are too small to gain from it",
)
NO_PEERS = Setting(
    name="NCCL_P2P_DISABLE",
    value="1",
    reason="no pair of GPUs can read the other's memory: traffic goes through the host's memory anyway, and a driver "
    "that claims peer access behind a host bridge (ACS, IOMMU) would hang instead",
)

# What the published study set on two RTX 4070 Ti SUPER behind a PCIe host bridge, and what is to be thought of it.
STUDY = (
    Setting(name="NCCL_P2P_DISABLE", value="1", reason="taken where no pair has peer access, as there: see settings()"),
    Setting(
        name="NCCL_ALGO",
        value="Tree",
        reason="not taken: of two ranks a tree is a ring; NCCL has Tree for all-reduce alone, so the other collectives "
        "have no algorithm left. Since 2.24 `allreduce:tree` says what was meant",
    ),
    Setting(
        name="NCCL_PROTO",
        value="Simple",
        reason="not taken: it gives up LL, the protocol with the lowest latency, which small gradients need most. "
        "NCCL's documentation discourages setting it, but to exclude a protocol that is suspected of a fault",
    ),
    Setting(
        name="NCCL_BUFFSIZE",
        value="33554432",
        reason="not taken unmeasured: eight times the default of 4 MiB, for each channel and pair, of the GPU's "
        "memory; `finetune bench comm --settings` says what it is worth",
    ),
    Setting(
        name="NCCL_NTHREADS",
        value="16",
        reason="refused: the allowed values are 64, 128, 256 and 512 (default 512), so 16 cannot have taken effect",
    ),
    Setting(
        name="NCCL_DEBUG", value="INFO", reason="not taken: for finding a fault; it prints hundreds of lines a rank"
    ),
)


def settings(hardware: Hardware, *, nodes: int = 1, interface: str | None = None) -> tuple[Setting, ...]:
    """The variables to set before the ranks start; none where NCCL's own choice stands.

    Args:
        hardware: from `survey()`. Of links that are not known nothing is concluded.
        nodes: machines of the run.
        interface: the network interface that joins them, such as "eth0".
    """
    found: list[Setting] = []
    links = hardware.links or ()
    if links and all(link.nvlinks for link in links):
        found.append(NO_MULTICAST)
    elif links and all(link.peer_access is False for link in links):
        found.append(NO_PEERS)
    if nodes > 1:
        found.append(_interface(interface))
    return tuple(found)


def _interface(name: str | None) -> Setting:
    if name is not None:
        return Setting(
            name="NCCL_SOCKET_IFNAME",
            value=f"={name}",
            reason=f"the machines meet on {name}; without it NCCL takes the first interface that it finds",
        )
    return Setting(
        name="NCCL_SOCKET_IFNAME",
        value="^lo,docker,veth,virbr",
        reason="these interfaces exist on every machine and join none; better is the name of the one that does (=eth0)",
    )


def in_words(hardware: Hardware, chosen: tuple[Setting, ...]) -> str:
    """Why these settings and no others, in one sentence."""
    links = hardware.links
    if chosen:
        return "; ".join(f"{one.name}={one.value}: {one.reason}" for one in chosen)
    if hardware.device == "cpu":
        return "no NCCL setting: ranks on a CPU meet through gloo"
    if not links:
        return "no NCCL setting: " + ("the links are not known" if links is None else "one GPU does not communicate")
    if any(link.peer_access is None for link in links):
        return "no NCCL setting: peer access is not known, and NCCL finds out"
    if all(link.peer_access for link in links):
        return "no NCCL setting: all pairs reach each other's memory over PCIe, and NCCL uses that by itself"
    return "no NCCL setting: some pairs have peer access and some have not; NCCL chooses for each pair"
