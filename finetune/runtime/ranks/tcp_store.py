"""The store at MASTER_ADDR and MASTER_PORT, in which the ranks find each other."""

from __future__ import annotations

import contextlib
import functools
import os
from datetime import timedelta
from typing import Any

from finetune.errors import UserError
from finetune.runtime.ranks import distributed, hang, rendezvous

_join_limit: dict[str, Any] = {}  # `seconds` and `setting` of rendezvous.Place, once they are known


def limit_waiting(seconds: int, setting: str) -> None:
    """How long ranks wait there for each other, and the name of that setting."""
    _join_limit.update(seconds=seconds, setting=setting)


@functools.cache
def store() -> Any:
    """This process's client of the store."""
    return open_store()


def open_store() -> Any:
    """Another client of the store, which torch's launcher hosts, or else rank 0. It has its own connection, because
    a call that waits holds up all others of a connection.

    Raises:
        UserError: it cannot be reached in time.
    """
    hosts_it = distributed.ranks().is_main and not launcher_hosts_it()
    timeout = timedelta(seconds=hang.START_SECONDS)
    return rendezvous.open_store(place(), hosts_it=hosts_it, timeout=timeout, warn=warn)


def place() -> rendezvous.Place:
    """Where the launcher has the ranks meet.

    Raises:
        UserError: it has not set MASTER_ADDR and MASTER_PORT.
    """
    me, address, port = distributed.ranks(), os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not (port.isdecimal() and 0 < int(port) < 65536):
        raise UserError(
            f"The launcher's variables are incomplete: MASTER_ADDR={address!r}, MASTER_PORT={port!r}. Set them to the "
            "address of the machine of rank 0 and a free port of it (1-65535), the same for all ranks."
        )
    return rendezvous.Place(
        address=address,
        port=int(port),
        rank=me.rank,
        world_size=me.world_size,
        rank_0_here=me.are_here(0),
        **_join_limit,
    )


def launcher_hosts_it() -> bool:
    """Whether torch's launcher hosts the process group's store, rather than rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def of_attempt(attempt: str, store: Any) -> Any:
    """A store, as the ranks of one attempt see it."""
    from torch.distributed import PrefixStore

    return PrefixStore(f"finetune/{attempt}", store)


def warn(text: str) -> None:
    """Print a warning, from any thread."""
    with contextlib.suppress(OSError):
        os.write(2, f"warning: {text}\n".encode())
