"""The process group, from its start to its end, and the watch of the other ranks meanwhile."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from finetune.errors import UserError, describe
from finetune.runtime.ranks import activity, distributed, failures, hang, launcher, machines, multinode, tcp_store

_machines = 1  # on which the ranks are
_backstop_seconds = 0  # by which the timeout of the default process group exceeds the configured one


def start(
    *,
    cpu: bool,
    timeout_seconds: int,
    timeout_setting: str | None = "training.ddp_timeout",
    on_failure: Callable[..., None] | None = None,
) -> None:
    """Create the process group with the configured timeout, before a library creates one with its default, and watch
    the other ranks until `finish`.

    `timeout_setting` is the name of that timeout in messages, or None if the user cannot set it.

    `on_failure(message)` is called on this rank if another rank fails, just before this process exits.

    Raises:
        UserError: a process group of another size exists already.
    """
    multinode.meet()
    made_here = connect(cpu=cpu, timeout_seconds=timeout_seconds)
    _leave_timeouts_to_the_watch(timeout_seconds if made_here else None)
    _begin_watching(timeout_seconds, timeout_setting, on_failure)


def connect(*, cpu: bool, timeout_seconds: int) -> bool:
    """Create the process groups, or use the default one that exists. Whether the default one was created here.

    Raises:
        UserError: a process group of another size exists already.
    """
    me = distributed.ranks()
    if me.world_size == 1 or distributed.connected():
        return False
    import torch.distributed as dist
    from accelerate import PartialState

    _choose_interface()
    made_here = not dist.is_initialized()
    timeout = timedelta(seconds=max(hang.START_SECONDS, timeout_seconds))
    arguments = {} if not made_here else _store_arguments(timeout)
    with _connection_errors():
        state = PartialState(cpu=cpu, timeout=timeout, **arguments)
    if state.num_processes != me.world_size:
        raise UserError(
            f"The launcher started {me.world_size} processes, but the process group has {state.num_processes}. "
            "Something initialized accelerate before this program did; launch it with a profile from "
            "accelerate_configs/."
        )
    with _connection_errors():
        distributed.use_host_group(dist.new_group(backend="gloo", timeout=timeout))
    return made_here


def _choose_interface() -> None:
    """Have gloo connect over the network to the other machines, unless the user has chosen an interface. Its own choice
    is the address of the host's name, on which no other machine can reach it if that is 127.0.1.1 (Debian, Ubuntu)."""
    if distributed.ranks().on_several_machines and "GLOO_SOCKET_IFNAME" not in os.environ:
        route = machines.route_to(os.environ.get("MASTER_ADDR"))
        if route is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = route[0]


def _begin_watching(
    timeout_seconds: int, timeout_setting: str | None, on_failure: Callable[..., None] | None
) -> list[threading.Thread]:
    """Start the threads that look after the other ranks; every rank calls it."""
    if not distributed.connected():
        return []
    global _machines
    me = distributed.ranks()
    here = distributed.gather_objects((machines.identity(), os.getpid(), activity.share()))
    _machines = len({machine for machine, _, _ in here})
    peers = {rank: pid for rank, (host, pid, _) in enumerate(here) if host == here[me.rank][0] and rank != me.rank}
    born = failures.born(peers)
    watch = hang.Watch(
        rank=me.rank,
        world_size=me.world_size,
        store=failures.default_store(),
        limit=timeout_seconds,
        setting=timeout_setting,
        store_rank=None if tcp_store.launcher_hosts_it() else 0,
        look=lambda rank: activity.of_process(peers[rank], here[rank][2]) if rank in peers else None,
        fail=functools.partial(failures.end_hung, on_failure, born),
    )
    failures.watch(on_failure, born)
    multinode.has_begun()
    guard = hang.start(watch, failures.stopping)
    others = threading.Thread(target=failures.watch_others, args=(on_failure, peers, watch.round), daemon=True)
    others.start()
    return [guard, others]


@contextlib.contextmanager
def watched(
    timeout_seconds: int, timeout_setting: str | None, on_failure: Callable[..., None] | None
) -> Iterator[None]:
    """`start`'s watch for the time of a block that every rank enters, in a program that goes on after it: there a rank
    that ends is no failure. Takes over the timeout of a process group that a library has created."""
    if not distributed.connected():
        yield
        return
    multinode.meet()
    _leave_timeouts_to_the_watch(timeout_seconds)
    threads = _begin_watching(timeout_seconds, timeout_setting, on_failure)
    try:
        yield
        distributed.barrier()  # no rank leaves while another still watches it
    finally:
        failures.stopping.set()
        for thread in threads:
            thread.join(timeout=5)  # one that asks a dead store may not come back


def _leave_timeouts_to_the_watch(seconds: int | None) -> None:
    """Set torch's own timeouts, which end a run without naming a rank, later than those of `hang.Watch`.

    Args:
        seconds: of the default process group's collectives; None if it was created elsewhere and keeps its own.
    """
    global _backstop_seconds
    if not distributed.connected():
        return
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timedelta(seconds=hang.HOST_SECONDS), distributed.host_group())
    if seconds is not None:
        _backstop_seconds = hang.BACKSTOP_SECONDS
        _set_pg_timeout(timedelta(seconds=seconds + _backstop_seconds))


@contextlib.contextmanager
def _connection_errors() -> Iterator[None]:
    """Errors of torch when ranks that have met cannot connect to each other, in words.

    Raises:
        UserError: in place of torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        me = distributed.ranks()
        if not me.on_several_machines or failures.is_broken_connection(describe(error)):  # the latter: a rank has ended
            raise
        chosen = {name: os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name in os.environ}
        shown = ", ".join(f"{name}={value}" for name, value in chosen.items()) or "no interface was set"
        raise UserError(
            f"Rank {me.rank} on {socket.gethostname()} has found the other ranks at {tcp_store.place()} but cannot "
            f"connect to them: {' '.join(str(error).split())[:300]} ({shown}). Set GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME on each machine to its interface towards the others (`ip -brief address` lists them), "
            "and open all TCP ports between the machines."
        ) from None


def _store_arguments(timeout: timedelta) -> dict[str, Any]:
    """Arguments of `init_process_group` if this program brings the ranks together itself; else none.

    So it does with several machines; if no launcher has waited for the ranks; and after a restart. The static
    rendezvous (`accelerate launch`, `torchrun --master-addr`) keeps its store across restarts, as c10d does with
    several machines, including the addresses of the ended ranks, to which the new ones would try to connect. A prefix
    separates them.
    """
    me = distributed.ranks()
    if me.on_several_machines or not tcp_store.launcher_hosts_it():
        store = multinode.open_store()
    elif launcher.restarts():
        from torch.distributed import PrefixStore, TCPStore

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = PrefixStore(
            f"restart-{launcher.restarts()}",
            TCPStore(address, port, me.world_size, is_master=False, timeout=timeout),
        )
    else:
        return {}
    return {"store": store, "rank": me.rank, "world_size": me.world_size}


def machine_count() -> int:
    """On how many machines the ranks are, once they can communicate; 1 before."""
    return _machines


def group_timeout_seconds() -> float | None:
    """Timeout of the default process group's collectives; None with one rank."""
    if not distributed.connected():
        return None
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_group

    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    return _get_default_group()._get_backend(device).options._timeout.total_seconds() - _backstop_seconds


def finish() -> None:
    """Leave the process group. Every rank calls it once, at the end of a successful run."""
    if distributed.connected():
        import torch.distributed as dist

        distributed.barrier()
        failures.stopping.set()
        multinode.leave()
        dist.destroy_process_group()
        distributed.use_host_group(None)
