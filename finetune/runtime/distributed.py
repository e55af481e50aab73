"""Ranks, the process group and collectives. No other module reads RANK, LOCAL_RANK or WORLD_SIZE.

Importing this module does not import torch: the configuration is checked before anything heavy is loaded.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.runtime import activity, hang, interrupt, launcher

FAILURE_POLL_SECONDS = 1.0  # how often a rank checks whether another one has failed
# A launcher ends all ranks as soon as one exits with an error, so a rank that reports nothing must not exit first.
QUIET_SECONDS = 10.0


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
    return Ranks(rank=rank, local_rank=local_rank, world_size=world_size, local_world_size=local_world_size)


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

    made_here = not dist.is_initialized()
    timeout = timedelta(seconds=max(hang.START_SECONDS, timeout_seconds))
    state = PartialState(cpu=cpu, timeout=timeout, **_store_of_restart(timeout))
    if state.num_processes != me.world_size:
        raise UserError(
            f"The launcher started {me.world_size} processes, but the process group has {state.num_processes}. "
            "Something initialized accelerate before this program did; launch it with a profile from "
            "accelerate_configs/."
        )
    _host_group = dist.new_group(backend="gloo", timeout=timeout)
    return made_here


def _begin_watching(
    timeout_seconds: int, timeout_setting: str | None, on_failure: Callable[..., None] | None
) -> list[threading.Thread]:
    """Start the threads that look after the other ranks; every rank calls it."""
    if _host_group is None:
        return []
    me = ranks()
    here = gather_objects((socket.gethostname(), os.getpid(), activity.share()))
    peers = {rank: pid for rank, (host, pid, _) in enumerate(here) if host == here[me.rank][0] and rank != me.rank}
    watch = hang.Watch(
        rank=me.rank,
        world_size=me.world_size,
        store=_store(),
        limit=timeout_seconds,
        setting=timeout_setting,
        store_rank=None if _launcher_hosts_store() else 0,
        look=lambda rank: activity.of_process(peers[rank], here[rank][2]) if rank in peers else None,
        fail=functools.partial(_end_hung, on_failure, _born(peers)),
    )
    _stop_watching.clear()
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


def _store_of_restart(timeout: timedelta) -> dict[str, Any]:
    """Arguments of `init_process_group` after a launcher has restarted its ranks; else none.

    The static rendezvous (`accelerate launch`, `torchrun --master-addr`) keeps its store across restarts, including the
    addresses of the ended ranks, to which the new ones would try to connect. A prefix separates them.
    """
    if not launcher.restarts() or not _launcher_hosts_store():
        return {}
    from torch.distributed import PrefixStore, TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, ranks().world_size, is_master=False, timeout=timeout)
    own = PrefixStore(f"restart-{launcher.restarts()}", store)
    return {"store": own, "rank": ranks().rank, "world_size": ranks().world_size}


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

_FAILURE = "finetune/failure"
_stop_watching = threading.Event()


def claim_failure(message: str) -> bool:
    """Announce to the other ranks that this one has failed. True if it is the first: its error is the one to report.

    Without a process group ranks cannot agree, so the first rank of each machine reports: all of them read the same
    configuration and the same files.
    """
    _stop_watching.set()
    if _host_group is None:
        return ranks().is_local_main
    return first_failure(message) == message


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
    _stop_watching.set()
    if _host_group is None:
        return message
    own = json.dumps([ranks().rank, message])
    try:
        found = _store().compare_set(_FAILURE, "", own).decode()
    except Exception:  # the rank that hosts the store has ended: it failed first
        return "rank 0: it ended, and the process group's store with it"
    rank, first = json.loads(found)
    if rank == ranks().rank:  # this rank, or its watch, which has said that others are stuck
        return first
    return f"rank {rank}: {first}"


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
    store = _store()
    while not _stop_watching.wait(FAILURE_POLL_SECONDS):
        try:
            each_second()
            if not store.check([_FAILURE]):
                continue
            rank, message = json.loads(store.get(_FAILURE))
        except Exception:
            if _stop_watching.is_set():
                return
            if _launcher_hosts_store():
                interrupt.request("the end of the launcher that hosts the ranks' store")
                rank, message = _wait_for_lost_peer(peers), "it ended without a checkpoint after its launcher had ended"
            else:
                rank, message = 0, "the rank that hosts the process group's store has ended"
            if _stop_watching.is_set():
                return
        if on_failure is not None:
            on_failure(f"rank {rank}: {message}")
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
    import psutil

    own = json.dumps([ranks().rank, message])
    if store_answers and _store().compare_set(_FAILURE, "", own).decode() != own:
        return
    with contextlib.suppress(OSError):
        os.write(2, f"error: [rank {ranks().rank}] {message}\n".encode())  # sys.stderr may be locked
    if on_failure is not None:
        on_failure(message, in_place_of_main=0 in silent)
    for pid, born in (peers[rank] for rank in silent if rank in peers):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.create_time() == born:
                process.kill()
    threading.Event().wait(3 * FAILURE_POLL_SECONDS)  # the others have noticed by then: they end first
    os._exit(1)


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
