"""The store at MASTER_ADDR and MASTER_PORT, in which the ranks find each other."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from finetune.errors import UserError
from finetune.runtime.ranks import distributed, rendezvous
from finetune.runtime.types import RankStore

if TYPE_CHECKING:
    from torch.distributed import Store

START_SECONDS = 1800  # for each machine to prepare its data before the ranks connect


@dataclass(frozen=True, kw_only=True)
class JoinLimit:
    """How long ranks wait for each other in the store, and the name of that setting, if the user can set it."""

    seconds: float = 600.0  # as torch's launchers wait for each other
    setting: str | None = None


def open_store(limit: JoinLimit) -> Store:
    """A client of the store, which torch's launcher hosts, or else rank 0 as long as it keeps one of its clients. Each
    has its own connection, because a call that waits holds up all others of a connection.

    Raises:
        UserError: the store cannot be reached in time.
    """
    hosts_it = distributed.ranks().is_main and not launcher_hosts_it()
    timeout = timedelta(seconds=START_SECONDS)
    return rendezvous.open_store(endpoint(limit), hosts_it=hosts_it, timeout=timeout, warn=warn)


def endpoint(limit: JoinLimit) -> rendezvous.Endpoint:
    """The address of the store, from the launcher.

    Raises:
        UserError: it has not set MASTER_ADDR and MASTER_PORT.
    """
    me, address, port = distributed.ranks(), os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not (port.isdecimal() and 0 < int(port) < 65536):
        raise UserError(
            f"The launcher's variables are incomplete: MASTER_ADDR={address!r}, MASTER_PORT={port!r}. Set them to the "
            "address of the machine of rank 0 and a free port of it (1-65535), the same for all ranks."
        )
    return rendezvous.Endpoint(
        address=address,
        port=int(port),
        rank=me.rank,
        world_size=me.world_size,
        rank_0_here=me.is_local(0),
        seconds=limit.seconds,
        setting=limit.setting,
    )


def launcher_hosts_it() -> bool:
    """Whether torch's launcher hosts the process group's store, rather than rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_for_attempt(attempt: str, store: Store) -> RankStore:
    """A store as the ranks of one attempt see it."""
    from torch.distributed import PrefixStore

    return PrefixStore(f"finetune/{attempt}", store)


def warn(text: str) -> None:
    """Print a warning, from any thread."""
    with contextlib.suppress(OSError):
        os.write(2, f"warning: {text}\n".encode())
