"""Ranks, the process group and collectives. No other module reads RANK, LOCAL_RANK or WORLD_SIZE.

Importing this module does not import torch: the configuration is checked before anything heavy is loaded.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from finetune.errors import UserError, describe
from finetune.runtime import activity, hang, interrupt, launcher, machines, rendezvous
from finetune.runtime.machines import Machine

FAILURE_POLL_SECONDS = 1.0  # how often a rank checks whether another one has failed
# A launcher ends all ranks as soon as one exits with an error, so a rank that reports nothing must not exit first.
QUIET_SECONDS = 10.0
ANNOUNCE_SECONDS = 10.0  # in which a rank that fails before it has met the others tries to reach them
# A broken connection is the consequence of something: how long its rank waits for another one to report what it was.
CAUSE_SECONDS = 8.0
STORE_SECONDS = 3.0  # for an answer of the store, or a write of run.json, when a machine is gone


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process's rank, and the number of ranks."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @property
    def is_main(self) -> bool:
        """The one process of a run that writes files and prints to the terminal."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """The one process of each machine that prepares the data there."""
        return self.local_rank == 0

    @property
    def first_here(self) -> int:
        """The first rank of this machine; launchers number the ranks of a machine one after the other."""
        return self.rank - self.local_rank

    @property
    def on_several_machines(self) -> bool:
        """Whether the run has ranks on other machines."""
        return self.local_world_size < self.world_size

    def are_here(self, rank: int) -> bool:
        """Whether a rank is on this machine."""
        return self.first_here <= rank < self.first_here + self.local_world_size


@functools.cache
def ranks() -> Ranks:
    """The ranks in the launcher's environment; a single rank without a launcher.

    Raises:
        UserError: the variables are inconsistent, or the launcher started fewer processes than it was asked for.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    given = {name: os.environ.get(name) for name in names}
    if given["WORLD_SIZE"] is None:
        asked = _launcher_profile().get("num_processes", 1)
        if asked > 1:
            raise UserError(
                f"accelerate launch was asked for {asked} processes but started one, as it does with "
                "`distributed_type: MULTI_CPU`. Use a profile from accelerate_configs/ (cpu_2.yaml for two CPU ranks), "
                "or `distributed_type: MULTI_GPU` with `use_cpu: true`."
            )
        return Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1)
    try:
        rank, local_rank, world_size = (int(given[name] or "missing") for name in names)
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    except ValueError:
        raise UserError(
            f"The launcher's variables are incomplete: {given}. All three must be integers; start the run with "
            "`accelerate launch -m finetune.train` or `torchrun -m finetune.train`."
        ) from None
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size):
        raise UserError(
            f"The launcher's variables are inconsistent: {given}, LOCAL_WORLD_SIZE={local_world_size}. Start the run "
            "with `accelerate launch -m finetune.train` or `torchrun -m finetune.train`."
        )
    if "LOCAL_WORLD_SIZE" not in os.environ and rank != local_rank:
        raise UserError(
            f"RANK={rank} and LOCAL_RANK={local_rank} are of a run on several machines, but LOCAL_WORLD_SIZE is not "
            "set. Set it on every machine to the number of its ranks, or start the run with torchrun "
            "(docs/two-machines.md)."
        )
    _check_count(world_size)
    return Ranks(rank=rank, local_rank=local_rank, world_size=world_size, local_world_size=local_world_size)


def _check_count(world_size: int) -> None:
    """accelerate starts `num_processes // num_machines` ranks on each machine, whatever remains.

    Raises:
        UserError: these are fewer than `num_processes`.
    """
    profile = _launcher_profile()
    asked, machines_asked = profile.get("num_processes", 1), profile.get("num_machines", 1)
    if machines_asked != 1 and asked > 1 and asked != world_size:
        raise UserError(
            f"accelerate launch was asked for {asked} processes on {machines_asked} machines and started {world_size}: "
            "it starts the same number on each. Set num_processes to a multiple of num_machines; for machines with "
            "different numbers of GPUs use torchrun, with its own --nproc_per_node on each (docs/two-machines.md)."
        )


@functools.cache
def _launcher_profile() -> dict[str, Any]:
    """The settings of the `accelerate launch` that started this process; empty for other launchers.

    accelerate does not pass on the requested number of processes, nor, in a distributed launch, the choice of the CPU.
    Both are read from the parent's command line and the profile it names.
    """
    argv = launcher.accelerate_arguments()
    if argv is None:
        return {}
    import yaml

    own = argv[: argv.index("-m")] if "-m" in argv else argv  # arguments after -m belong to the script
    options = dict(zip(own, own[1:], strict=False))
    options |= dict(arg.split("=", 1) for arg in own if arg.startswith("--") and "=" in arg)
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    file = Path(options.get("--config_file", home / "accelerate" / "default_config.yaml"))
    try:
        profile = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}) if file.is_file() else {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"accelerate's profile {file} is not valid YAML: {why}. Fix it or use another.") from None
    if not isinstance(profile, dict):
        raise UserError(f"accelerate's profile {file} must be a mapping of settings. Fix it or use another.")
    asked = options.get("--num_processes", profile.get("num_processes"))
    if asked in (None, -1):  # accelerate's placeholders for "see the command line"
        asked = 1
    if not str(asked).isdecimal() or int(asked) < 1:
        raise UserError(f"accelerate's num_processes must be at least 1: {asked}. Give the number of ranks to start.")
    profile["num_processes"] = int(asked)
    on = str(options.get("--num_machines", profile.get("num_machines") or 1))
    profile["num_machines"] = int(on) if on.isdecimal() else 1
    if "--cpu" in own or "--use_cpu" in own:
        profile["use_cpu"] = True
    if "--num_cpu_threads_per_process" in options:
        profile["num_cpu_threads_per_process"] = options["--num_cpu_threads_per_process"]
    return profile


def launcher_setting(name: str) -> Any:
    """A setting of the `accelerate launch` that started this process, from its options or its profile; None if it is
    not set."""
    return _launcher_profile().get(name)


def wants_cpu() -> bool:
    """Whether the launcher asked for CPU training (`use_cpu: true` in the accelerate profile)."""
    return bool(_launcher_profile().get("use_cpu"))


# --- several machines -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Meeting:
    """What ranks on several machines share before there is a process group, and beside it."""

    store: Any  # a client of the store that the process group will use
    links: machines.Links | None  # on the first rank of each machine
    group_begun: threading.Event  # set when the watch of the process group takes over


_meeting: _Meeting | None = None
_machines = 1
_join_limit: dict[str, Any] = {}  # `seconds` and `setting` of rendezvous.Place, once they are known


def meet(join_seconds: int | None = None) -> None:
    """If the run has several machines, join their store and follow them from here on: one that fails while it prepares
    its data, or ends, ends the run everywhere. Every rank calls it as early as it can; further calls do nothing.

    Only for programs that end with the run: one machine may not end before the others.

    Args:
        join_seconds: training.join_timeout; without a configuration 600.

    Raises:
        UserError: the machine that hosts the store cannot be reached.
    """
    global _meeting
    me = ranks()
    if _meeting is not None:
        return
    if join_seconds is not None:
        _join_limit.update(seconds=join_seconds, setting="training.join_timeout")
    if not me.on_several_machines:
        return
    store = _client(_attempt())
    links = machines.Links(_end_without, _warn) if me.is_local_main else None
    _meeting = _Meeting(store=store, links=links, group_begun=threading.Event())
    if links is not None:
        _, address = machines.route_to(os.environ.get("MASTER_ADDR")) or (None, None)
        own = _this_machine(address=address, port=links.port)
        store.set(f"{_MACHINE}/{own.first}", own.to_json())
        threading.Thread(target=_follow_machines, args=(links, own, store), daemon=True).start()
    threading.Thread(target=_watch_until_the_group_has_begun, daemon=True).start()


def _this_machine(*, address: str | None = None, port: int = 0) -> Machine:
    me = ranks()
    return Machine(
        name=socket.gethostname(),
        identity=machines.identity(),
        first=me.first_here,
        count=me.local_world_size,
        address=address,
        port=port,
        launch=launcher.launch_id(),
    )


def hosts() -> list[dict[str, Any]]:
    """The machines of the run for run.json: {host, ranks, launch} of each, in rank order. Every rank calls it once the
    ranks can communicate."""
    found = {one.first: one for one in gather_objects(_this_machine())}
    return [{"host": one.name, "ranks": list(one.ranks), "launch": one.launch} for _, one in sorted(found.items())]


@functools.cache
def _raw_store() -> Any:
    """A client of the store at MASTER_ADDR, which torch's launcher hosts, or else rank 0.

    Raises:
        UserError: it cannot be reached in time.
    """
    hosts_it = ranks().is_main and not _launcher_hosts_store()
    timeout = timedelta(seconds=hang.START_SECONDS)
    return rendezvous.open_store(_place(), hosts_it=hosts_it, timeout=timeout, warn=_warn)


def _place() -> rendezvous.Place:
    """Where the launcher has the ranks meet.

    Raises:
        UserError: it has not set MASTER_ADDR and MASTER_PORT.
    """
    me, address, port = ranks(), os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
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


@functools.cache
def _attempt() -> str:
    """The name of this attempt, which all its ranks share and no earlier attempt had.

    Raises:
        UserError: rank 0 or its machine cannot be reached, or a rank has failed already.
    """
    store, place = _raw_store(), _place()
    if ranks().is_main:
        return rendezvous.begin(store, place, failed=_announce_for_another, give_up=_end_without_ranks, warn=_warn)
    return rendezvous.join(store, place, _end_if_one_has_failed, _warn)


def _end_without_ranks(attempt: str, message: str) -> None:
    """Rank 0, from a thread: end this process and all ranks that have come, because others have not."""
    if _stop_watching.is_set():  # this rank ends, or has ended, anyway
        return
    store = _within_attempt(attempt, _raw_store())
    first = _Failure.from_json(store.compare_set(_FAILURE, "", _own_failure(message).to_json()))
    if first.is_own:
        with contextlib.suppress(OSError):
            os.write(2, f"error: [rank {ranks().rank}] {message}\n".encode())  # sys.stderr may be locked
        threading.Event().wait(2 * FAILURE_POLL_SECONDS)  # this rank may host the store: the others read it first
        os._exit(1)
    _end_after(first, None)


def _announce_for_another(attempt: str, failure: str) -> None:
    """Rank 0 announces what a rank has left word of."""
    _within_attempt(attempt, _raw_store()).compare_set(_FAILURE, "", failure)


def _end_if_one_has_failed(attempt: str, early: str) -> None:
    """End this process if a rank has failed and rank 0 does not answer: it may be that rank."""
    store = _within_attempt(attempt, _raw_store())
    found = early or (store.get(_FAILURE) if attempt and store.check([_FAILURE]) else None)
    if found:
        _end_after(_Failure.from_json(found), None)


def machine_count() -> int:
    """On how many machines the ranks are, once they can communicate; 1 before."""
    return _machines


def _client(attempt: str) -> Any:
    """The store of an attempt, over a connection of its own: a call that waits holds up all others of a connection."""
    return _within_attempt(attempt, _raw_store.__wrapped__())


def _within_attempt(attempt: str, store: Any) -> Any:
    from torch.distributed import PrefixStore

    return PrefixStore(f"finetune/{attempt}", store)


def _follow_machines(links: machines.Links, own: Machine, store: Any) -> None:
    """Wait until every machine has described itself, each beginning with the rank after the last one of another."""
    others, first = {}, 0
    with contextlib.suppress(Exception):  # the store has ended: its own watch notices
        while first < ranks().world_size:
            while not store.check([f"{_MACHINE}/{first}"]):
                if _stop_watching.wait(FAILURE_POLL_SECONDS):
                    return
            machine = Machine.from_json(store.get(f"{_MACHINE}/{first}"))
            others[first] = machine
            first += machine.count
        del others[own.first]
        links.follow(own, others, _attempt())


def _watch_until_the_group_has_begun() -> None:
    """End this process soon after a rank of another machine has failed, while it prepares its data or waits."""
    assert _meeting is not None
    while not _meeting.group_begun.wait(FAILURE_POLL_SECONDS):
        if _stop_watching.is_set():
            return
        try:
            if not _meeting.store.check([_FAILURE]):
                continue
            failure = _Failure.from_json(_meeting.store.get(_FAILURE))
        except Exception:
            if _meeting.group_begun.is_set() or _stop_watching.is_set():
                return
            host = os.environ.get("MASTER_ADDR", "")
            failure = _Failure(rank=0, message="the machine that hosts the ranks' store has ended", host=host)
        _end_after(failure, None)


def _end_without(machine: Machine, why: str) -> None:
    """End this process, from a thread: a machine of the run is gone, and with it every collective.

    Args:
        why: the kernel's reason; empty if the machine has closed the connection.
    """
    if _stop_watching.wait(FAILURE_POLL_SECONDS / 2):  # the run is over, or this rank reports a failure
        return
    message = machines.what_happened(machine, why)
    first = _within(STORE_SECONDS, lambda: _claim(message))  # the store may be on that machine
    if first is not None and not first.is_own:
        return  # what a rank has reported is the reason; the watch of failures ends this process
    _ending.set()
    _stop_watching.set()
    with contextlib.suppress(OSError):
        os.write(2, f"error: [rank {ranks().rank}] {message}\n".encode())  # sys.stderr may be locked
    if _on_failure is not None:
        record = functools.partial(_on_failure, message, in_place_of_main=0 in machine.ranks)
        _within(STORE_SECONDS, record)  # the disk may be on that machine as well
    if first is None:
        _kill(_here)  # they cannot learn it, and a launcher would wait 30 s for each of them
    threading.Event().wait(2 * FAILURE_POLL_SECONDS)
    os._exit(1)


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """What `call` returns, or None if it fails or takes longer."""
    found: list[Any] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            found.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def _warn(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"warning: {text}\n".encode())


# --- the process group -----------------------------------------------------------------------------------------------

_host_group: Any = None  # gloo: for objects and flags, so that neither touches the GPU
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
    meet()
    made_here = connect(cpu=cpu, timeout_seconds=timeout_seconds)
    _leave_timeouts_to_the_watch(timeout_seconds if made_here else None)
    _begin_watching(timeout_seconds, timeout_setting, on_failure)


def connect(*, cpu: bool, timeout_seconds: int) -> bool:
    """Create the process groups, or use the default one that exists. Whether the default one was created here.

    Raises:
        UserError: a process group of another size exists already.
    """
    global _host_group
    me = ranks()
    if me.world_size == 1 or _host_group is not None:
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
        _host_group = dist.new_group(backend="gloo", timeout=timeout)
    return made_here


def _choose_interface() -> None:
    """Have gloo connect over the network to the other machines, unless the user has chosen an interface. Its own choice
    is the address of the host's name, on which no other machine can reach it if that is 127.0.1.1 (Debian, Ubuntu)."""
    if ranks().on_several_machines and "GLOO_SOCKET_IFNAME" not in os.environ:
        route = machines.route_to(os.environ.get("MASTER_ADDR"))
        if route is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = route[0]


def _begin_watching(
    timeout_seconds: int, timeout_setting: str | None, on_failure: Callable[..., None] | None
) -> list[threading.Thread]:
    """Start the threads that look after the other ranks; every rank calls it."""
    if _host_group is None:
        return []
    global _on_failure, _here, _machines
    me = ranks()
    here = gather_objects((machines.identity(), os.getpid(), activity.share()))
    _machines = len({machine for machine, _, _ in here})
    peers = {rank: pid for rank, (host, pid, _) in enumerate(here) if host == here[me.rank][0] and rank != me.rank}
    born = _born(peers)
    watch = hang.Watch(
        rank=me.rank,
        world_size=me.world_size,
        store=_store(),
        limit=timeout_seconds,
        setting=timeout_setting,
        store_rank=None if _launcher_hosts_store() else 0,
        look=lambda rank: activity.of_process(peers[rank], here[rank][2]) if rank in peers else None,
        fail=functools.partial(_end_hung, on_failure, born),
    )
    _on_failure, _here = on_failure, born
    _stop_watching.clear()
    if _meeting is not None:
        _meeting.group_begun.set()
    guard = hang.start(watch, _stop_watching)
    failures = threading.Thread(target=_watch_for_failures, args=(on_failure, peers, watch.round), daemon=True)
    failures.start()
    return [guard, failures]


@contextlib.contextmanager
def watched(
    timeout_seconds: int, timeout_setting: str | None, on_failure: Callable[..., None] | None
) -> Iterator[None]:
    """`start`'s watch for the time of a block that every rank enters, in a program that goes on after it: there a rank
    that ends is no failure. Takes over the timeout of a process group that a library has created."""
    if _host_group is None:
        yield
        return
    meet()
    _leave_timeouts_to_the_watch(timeout_seconds)
    threads = _begin_watching(timeout_seconds, timeout_setting, on_failure)
    try:
        yield
        barrier()  # no rank leaves while another still watches it
    finally:
        _stop_watching.set()
        for thread in threads:
            thread.join(timeout=5)  # one that asks a dead store may not come back


def _leave_timeouts_to_the_watch(seconds: int | None) -> None:
    """Set torch's own timeouts, which end a run without naming a rank, later than those of `hang.Watch`.

    Args:
        seconds: of the default process group's collectives; None if it was created elsewhere and keeps its own.
    """
    global _backstop_seconds
    if _host_group is None:
        return
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timedelta(seconds=hang.HOST_SECONDS), _host_group)
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
        if not ranks().on_several_machines or _BROKEN.match(describe(error)):  # the latter: a rank has ended
            raise
        chosen = {name: os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name in os.environ}
        shown = ", ".join(f"{name}={value}" for name, value in chosen.items()) or "no interface was set"
        raise UserError(
            f"Rank {ranks().rank} on {socket.gethostname()} has found the other ranks at {_place()} but cannot "
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
    me = ranks()
    if me.on_several_machines or not _launcher_hosts_store():
        store = _client(_attempt())
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


def _launcher_hosts_store() -> bool:
    """Whether torch's launcher hosts the process group's store, rather than rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def group_timeout_seconds() -> float | None:
    """Timeout of the default process group's collectives; None with one rank."""
    if _host_group is None:
        return None
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_group

    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    return _get_default_group()._get_backend(device).options._timeout.total_seconds() - _backstop_seconds


def finish() -> None:
    """Leave the process group. Every rank calls it once, at the end of a successful run."""
    global _host_group
    if _host_group is not None:
        import torch.distributed as dist

        barrier()
        _stop_watching.set()
        if _meeting is not None and _meeting.links is not None:
            _meeting.links.close()
        dist.destroy_process_group()
        _host_group = None


# --- collectives; with one rank each of them just returns its argument -----------------------------------------------


def barrier() -> None:
    """Wait until every rank has called this."""
    if _host_group is not None:
        import torch.distributed as dist

        with hang.waiting("barrier"):
            dist.barrier(group=_host_group)


def drain_nccl_work() -> None:
    """Block until NCCL's watchdog has retired all outstanding collectives, so that the next one releases their tensors.

    The watchdog polls ten times a second. For collectives whose work object nobody waits on, such as DDP's, it queues
    the tensors, and the next collective releases them (torch's ProcessGroupNCCL.cpp, `shelvesToUnstash_`). Does nothing
    on other backends.
    """
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_backend() == "nccl":
        group = dist.distributed_c10d._get_default_group()
        if hasattr(group, "_wait_for_pending_works"):  # private: without it, a run only needs more memory
            group._wait_for_pending_works()


def gather_objects(value: Any) -> list[Any]:
    """Every rank's `value`, in rank order, on every rank. Runs on the host, without a GPU synchronization."""
    if _host_group is None:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * ranks().world_size
    with hang.waiting("all_gather_object"):
        dist.all_gather_object(values, value, group=_host_group)
    return values


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Element-wise sum of float64 `values` over all ranks, on the host."""
    if _host_group is None:
        return list(values)
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(values, dtype=torch.float64)
    with hang.waiting("all_reduce"):
        dist.all_reduce(tensor, group=_host_group)
    return tensor.tolist()


def gather_floats(values: Sequence[float]) -> list[list[float]]:
    """Every rank's float64 `values`, in rank order, on every rank; of the same length on all. On the host."""
    if _host_group is None:
        return [list(values)]
    import torch
    import torch.distributed as dist

    own = torch.tensor(values, dtype=torch.float64)
    parts = [torch.empty_like(own) for _ in range(ranks().world_size)]
    dist.all_gather(parts, own, group=_host_group)
    return [part.tolist() for part in parts]


class DelayedFlag:
    """Whether any rank has raised its flag, checked every step and known one step later, so that no step waits.

    All ranks get the same answer at the same step: `ask(flag)` starts a reduction of this step's flags on the host and
    returns the result of the previous one.
    """

    def __init__(self) -> None:
        self._pending: tuple[Any, Any] | None = None

    def ask(self, flag: bool) -> bool:
        """True on all ranks at the step after one in which any rank's `flag` was true."""
        if _host_group is None:
            return flag
        import torch
        import torch.distributed as dist

        answer = self.settle()
        tensor = torch.tensor([int(flag)])
        self._pending = (dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=_host_group, async_op=True), tensor)
        return answer

    def settle(self) -> bool:
        """Wait for the pending reduction, if any, and return its result."""
        if self._pending is None:
            return False
        work, tensor = self._pending
        with hang.waiting("all_reduce of the stop flags"):
            work.wait()
        self._pending = None
        return bool(tensor.item())


# --- stopping together ----------------------------------------------------------------------------------------------

_FAILURE, _MACHINE = "finetune/failure", "machine"
_stop_watching = threading.Event()
_ending = threading.Event()  # a thread reports why this process ends, and ends it
_on_failure: Callable[..., None] | None = None
_here: Mapping[int, tuple[int, float]] = {}  # process id and time of creation of the other ranks on this machine


def claim_failure(message: str) -> bool:
    """Announce to the other ranks that this one has failed. True if its error is the one to report: it is the first, or
    the first of its machine, whose output may be all that somebody sees.

    Without a process group ranks of one machine cannot agree, so its first rank reports: all of them read the same
    configuration and the same files.
    """
    _stop_watching.set()
    me = ranks()
    if me.on_several_machines:
        first = _announce(message)
        if first is None:
            return me.is_local_main
        return first.message == message if first.is_own else me.is_local_main and not me.are_here(first.rank)
    if _host_group is None:
        return me.is_local_main
    return first_failure(message) == message


def _announce(message: str) -> _Failure | None:
    """`_claim` among the ranks of all machines; None if this rank has not met them, and can only leave word."""
    if _meeting is not None:
        return _within(STORE_SECONDS, lambda: _claim(message))
    own = _own_failure(message).to_json()
    _within(ANNOUNCE_SECONDS, lambda: rendezvous.announce_early(_raw_store(), own))
    return None


def announce_interruption(reason: str) -> None:
    """Have the ranks on other machines end, which this machine's launcher does not reach: this rank ends at once."""
    if ranks().on_several_machines and _meeting is not None and not _stop_watching.is_set():
        _stop_watching.set()
        _within(STORE_SECONDS, lambda: _claim(f"stopped by {reason}"))


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """An announced failure."""

    rank: int
    message: str
    host: str

    @property
    def is_own(self) -> bool:
        return self.rank == ranks().rank

    def said(self) -> str:
        """Such as "rank 1: ..." or, on another machine, "rank 1 on node-b: ..."."""
        where = "" if ranks().are_here(self.rank) else f" on {self.host}"
        return f"rank {self.rank}{where}: {self.message}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> _Failure:
        return cls(**json.loads(text))


def _own_failure(message: str) -> _Failure:
    return _Failure(rank=ranks().rank, message=message, host=socket.gethostname())


def _claim(message: str) -> _Failure:
    """The first failure, which is this one if no other has been announced."""
    return _Failure.from_json(_failures().compare_set(_FAILURE, "", _own_failure(message).to_json()))


def _failures() -> Any:
    """The store in which the first failure is announced."""
    return _store() if _meeting is None else _meeting.store


def wait_for_launcher() -> bool:
    """Wait for the launcher to end this process, as it does once the rank that reports its error has exited.

    Returns:
        True if this rank has to report its own error after all: there was no process group to agree in, and nothing has
        ended this process.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Event().wait(QUIET_SECONDS)
    return _host_group is None


def first_failure(message: str) -> str:
    """The message of the rank that failed first, which is the reason why all ranks end; `message` if it is this one."""
    message = of_broken_connection(message) or message
    _stop_watching.set()
    if _host_group is None:
        return message
    try:
        first = _claim(message)
    except Exception:  # the rank that hosts the store has ended: it failed first
        return "rank 0: it ended, and the process group's store with it"
    return first.message if first.is_own else first.said()  # its own may be of its watch: that others are stuck


# What torch's errors say of a connection whose other side has ended: gloo's, NCCL's, and the store's.
_BROKEN = re.compile(
    r"(RuntimeError|Dist\w*Error): .*("
    r"Connection (reset|closed) by peer|Broken pipe|(Read|Write) error \[|Connection timed out|No route to host|"
    r"remote process exited|ncclRemoteError|ncclSystemError|failed to recv, got 0 bytes)",
    re.IGNORECASE | re.DOTALL,
)


def of_broken_connection(text: str) -> str | None:
    """A sentence in place of the text of an error of torch's, if it is about a connection to another rank; else None.

    That is the consequence of something, which this process is given time to learn: the launcher, or the watch of the
    other ranks and machines, then ends it, with what it was.
    """
    if ranks().world_size == 1 or not _BROKEN.match(text):
        return None
    until = time.monotonic() + CAUSE_SECONDS
    while time.monotonic() < until and not _stop_watching.wait(FAILURE_POLL_SECONDS / 4):
        pass
    if _ending.is_set():
        threading.Event().wait(QUIET_SECONDS)
    short = " ".join(text.split())[:200]
    return (
        f"The connection to another rank broke: {short}. A process has ended or the network has failed: see the "
        "end of the output on every machine, then start the run again with training.resume_from_checkpoint: true."
    )


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _watch_for_failures(
    on_failure: Callable[..., None] | None, peers: Mapping[int, int], each_second: Callable[[], None]
) -> None:
    """End this process soon after another rank has failed, even if the main thread is blocked in a collective.

    Args:
        on_failure: called with a message just before this process exits.
        peers: process ids of the other ranks of this machine, by rank.
        each_second: called before each look.
    """
    store = _failures()
    while not _stop_watching.wait(FAILURE_POLL_SECONDS):
        try:
            each_second()
            if not store.check([_FAILURE]):
                continue
            failure = _Failure.from_json(store.get(_FAILURE))
        except Exception:
            if _stop_watching.is_set():
                return
            if _launcher_hosts_store():
                interrupt.request("the end of the launcher that hosts the ranks' store")
                rank, message = _wait_for_lost_peer(peers), "it ended without a checkpoint after its launcher had ended"
            else:
                rank, message = 0, "the rank that hosts the process group's store has ended"
            failure = _Failure(rank=rank, message=message, host=os.environ.get("MASTER_ADDR", ""))
            if _stop_watching.is_set():
                return
        _end_after(failure, on_failure)


def _end_after(failure: _Failure, on_failure: Callable[..., None] | None) -> None:
    """End this process because a rank has failed. If that one prints its error on another machine, print it here."""
    me = ranks()
    if me.is_local_main and not me.are_here(failure.rank):
        with contextlib.suppress(OSError):
            os.write(2, f"error: [rank {me.rank}] {failure.said()}\n".encode())  # sys.stderr may be locked
    if on_failure is not None:
        on_failure(failure.said())
    threading.Event().wait(FAILURE_POLL_SECONDS)  # let the failed rank print its error first
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # the main thread may be inside NCCL, where no exception can reach it


def _born(peers: Mapping[int, int]) -> dict[int, tuple[int, float]]:
    """Process id and time of creation, which together mean one process for good, of each rank on this machine."""
    import psutil

    found = {}
    for rank, pid in peers.items():
        with contextlib.suppress(psutil.Error):
            found[rank] = (pid, psutil.Process(pid).create_time())
    return found


def _end_hung(
    on_failure: Callable[..., None] | None,
    peers: Mapping[int, tuple[int, float]],
    message: str,
    silent: Sequence[int],
    store_answers: bool,
) -> None:
    """Report that ranks are missing and end this process, from any thread. Returns if another rank has failed first.

    Of the missing ranks, those of this machine that cannot even answer are ended before this one: a launcher would
    wait 30 s for each of them, and its own report names the rank that ended first.

    Args:
        on_failure: called with `message`, and with `in_place_of_main=True` if rank 0 cannot write its record.
        peers: process ids and times of creation of the other ranks on this machine, by rank.
        silent: the ranks that do not answer.
        store_answers: whether the other ranks can be reached.
    """
    if store_answers and not ((first := _claim(message)).is_own and first.message == message):
        return
    with contextlib.suppress(OSError):
        os.write(2, f"error: [rank {ranks().rank}] {message}\n".encode())  # sys.stderr may be locked
    if on_failure is not None:
        on_failure(message, in_place_of_main=0 in silent)
    _kill({rank: peers[rank] for rank in silent if rank in peers})
    threading.Event().wait(3 * FAILURE_POLL_SECONDS)  # the others have noticed by then: they end first
    os._exit(1)


def _kill(processes: Mapping[int, tuple[int, float]]) -> None:
    """End ranks of this machine, given their process ids and times of creation, without a word."""
    import psutil

    for pid, born in processes.values():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.create_time() == born:
                process.kill()


def _wait_for_lost_peer(peers: Mapping[int, int]) -> int:
    """Wait until the main thread has ended the run, or another rank on this machine has ended first. Returns that rank.

    Ranks can still save a checkpoint together, because their connections do not depend on the store.
    """
    import psutil

    def ended(pid: int) -> bool:
        try:  # an ended process stays a zombie if its parent has ended as well
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    while True:
        lost = [rank for rank, pid in peers.items() if ended(pid)]
        if _stop_watching.wait(FAILURE_POLL_SECONDS) or lost:  # waits first: ranks may just end with the run
            return lost[0] if lost else ranks().rank
