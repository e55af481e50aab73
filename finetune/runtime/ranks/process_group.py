"""The process group, from its start to its end, and the watch of the other ranks during that time."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

from finetune.errors import UserError, describe
from finetune.runtime.ranks import activity, distributed, failures, hang, launcher, machines, multinode, rendezvous
from finetune.runtime.types import JsonObject, OnFailure

_machines = 1  # on which the ranks are
_backstop_seconds = 0  # by which the timeout of the default process group exceeds the configured one


def start(
    *,
    cpu: bool,
    timeout_seconds: int,
    timeout_setting: str | None = "training.ddp_timeout",
    on_failure: OnFailure | None = None,
) -> None:
    """Create the process group with the configured timeout, before a library creates one with its default, and watch
    the other ranks until `finish`.

    `timeout_setting` is the name of that timeout in messages, or None if the user cannot set it.

    `on_failure(message)` is called on this rank if another rank fails, just before this process exits.

    Raises:
        UserError: a process group of another size exists already.
    """
    multinode.node.connect()
    made_here = connect(cpu=cpu, timeout_seconds=timeout_seconds)
    _extend_torch_timeouts(timeout_seconds if made_here else None)
    _start_watching(timeout_seconds, timeout_setting, on_failure)


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

    choose_gloo_interface()
    made_here = not dist.is_initialized()
    timeout = timedelta(seconds=max(rendezvous.START_SECONDS, timeout_seconds))
    arguments = {} if not made_here else _store_arguments(timeout)
    with _connection_errors():
        state = PartialState(cpu=cpu, timeout=timeout, **arguments)
    if state.num_processes != me.world_size:
        raise UserError(
            f"The launcher started {me.world_size} processes, but the process group has {state.num_processes}. "
            "Something initialized accelerate before this program did; launch it with `torchrun --standalone "
            f"--nproc_per_node {me.world_size}`."
        )
    with _connection_errors():
        distributed.use_host_group(dist.new_group(backend="gloo", timeout=timeout))
    return made_here


def choose_gloo_interface() -> None:
    """Have gloo connect over the network to the other machines, unless the user has chosen an interface. Its own choice
    is the address of the host's name, on which no other machine can reach it if that is 127.0.1.1 (Debian, Ubuntu)."""
    if distributed.ranks().on_several_machines and "GLOO_SOCKET_IFNAME" not in os.environ:
        route = machines.route_to(os.environ.get("MASTER_ADDR"))
        if route is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = route[0]


def _start_watching(
    timeout_seconds: int, timeout_setting: str | None, on_failure: OnFailure | None
) -> list[threading.Thread]:
    """Start the threads that watch the other ranks; every rank calls it."""
    if not distributed.connected():
        return []
    global _machines
    me = distributed.ranks()
    here = distributed.gather_objects((machines.machine_id(), os.getpid(), activity.share()))
    _machines = len({machine for machine, _, _ in here})
    peers = {rank: pid for rank, (host, pid, _) in enumerate(here) if host == here[me.rank][0] and rank != me.rank}
    started = failures.process_start_times(peers)
    watch = hang.Watch(
        rank=me.rank,
        world_size=me.world_size,
        store=failures.default_store(),
        limit=timeout_seconds,
        setting=timeout_setting,
        read_activity=lambda rank: activity.read_from_process(peers[rank], here[rank][2]) if rank in peers else None,
        fail=functools.partial(failures.exit_hung, on_failure, started),
    )
    failures.set_failure_handler(on_failure, started)
    multinode.node.hand_over()
    hang.start(watch)
    others = threading.Thread(target=failures.watch_other_ranks, args=(on_failure, peers, watch.poll), daemon=True)
    others.start()
    return [others]


@contextlib.contextmanager
def watching(timeout_seconds: int, timeout_setting: str | None, on_failure: OnFailure | None) -> Iterator[None]:
    """`start`'s watch during a block that every rank enters, in a program that continues after it, where a rank that
    ends is not a failure. Takes over the timeout of a process group that a library has created."""
    if not distributed.connected():
        yield
        return
    multinode.node.connect()
    _extend_torch_timeouts(timeout_seconds)
    threads = _start_watching(timeout_seconds, timeout_setting, on_failure)
    try:
        yield
        distributed.barrier()  # no rank leaves while another still watches it
    finally:
        failures.stopping.set()
        for thread in threads:
            thread.join(timeout=5)  # one that asks a dead store may not come back


def _extend_torch_timeouts(seconds: int | None) -> None:
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
    """Report torch's error as a UserError if ranks that have found each other cannot connect to each other."""
    try:
        yield
    except RuntimeError as error:
        me = distributed.ranks()
        if not me.on_several_machines or failures.is_broken_connection(describe(error)):  # the latter: a rank has ended
            raise
        chosen = {name: os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name in os.environ}
        shown = ", ".join(f"{name}={value}" for name, value in chosen.items()) or "no interface was set"
        raise UserError(
            f"Rank {me.rank} on {socket.gethostname()} has found the other ranks at {rendezvous.address()} but "
            f"cannot connect to them: {' '.join(str(error).split())[:300]} ({shown}). Set GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME on each machine to its interface towards the others (`ip -brief address` lists them), "
            "and open all TCP ports between the machines."
        ) from None


def _store_arguments(timeout: timedelta) -> JsonObject:
    """Arguments of `init_process_group` if this program chooses the store; else none.

    It does with several machines, and after a restart. The static rendezvous (`accelerate launch`, `torchrun
    --master-addr`) keeps its store across restarts, including the addresses of the ended ranks, to which the new ones
    would try to connect. A prefix separates them.
    """
    me = distributed.ranks()
    if me.on_several_machines:
        store = multinode.open_store()
    elif rendezvous.launcher_hosts_it() and launcher.restarts():
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
        multinode.node.leave()
        dist.destroy_process_group()
        distributed.use_host_group(None)
