"""Fail fast: report the first rank's failure to the others and stop every rank."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from finetune.runtime.ranks import distributed, interrupt, launcher, machines, rendezvous
from finetune.runtime.ranks.machines import Machine
from finetune.runtime.types import OnFailure, RankStore, Stored

Result = TypeVar("Result")

FAILURE_POLL_SECONDS = 1.0  # how often a rank checks whether another one has failed
# A launcher ends all ranks as soon as one exits with an error, so a rank that reports nothing must not exit first.
QUIET_SECONDS = 10.0
ANNOUNCE_SECONDS = 10.0  # in which a rank that fails before it has joined the others tries to reach them
# A broken connection is the consequence of something: how long its rank waits for another one to report what it was.
CAUSE_SECONDS = 8.0
ALIKE_SECONDS = 1.0  # for the other ranks to fail with the same error
STORE_SECONDS = 3.0  # for an answer of the store, or a write of run.json, when a machine is gone

FAILED = "finetune/failed"  # key of each: with the rank and a digest of its message
stopping = threading.Event()  # set when this rank ends, or the run does: nobody watches the others any more
_exiting = threading.Event()  # a thread reports why this process ends, and ends it
_on_failure: OnFailure | None = None
_local_ranks: Mapping[int, tuple[int, float]] = {}  # process id and time of creation of the other ranks on this machine
_shared_store: RankStore | None = None  # of ranks on several machines, which they join before there is a process group


def announce_through(store: RankStore | None) -> None:
    """Announce failures in this store of ranks on several machines, before there is a process group and after."""
    global _shared_store
    _shared_store = store


def claim_failure(message: str) -> bool:
    """Announce to the other ranks that this one has failed. True if its error is the one to report: it is the first, or
    the first of its machine, whose output may be all that somebody sees.

    Without a process group ranks of one machine cannot agree, so its first rank reports: all of them read the same
    configuration and the same files.
    """
    stopping.set()
    me = distributed.ranks()
    if me.on_several_machines:
        first = _announce(message)
        if first is None:
            return me.is_local_main
        return first.message == message if first.is_own else me.is_local_main and not me.is_local(first.rank)
    if not distributed.connected():
        return me.is_local_main
    return first_failure(message) == message


def _announce(message: str) -> Failure | None:
    """`claim` among the ranks of all machines; None if this rank has not joined them yet."""
    if _shared_store is not None:
        return _call_with_timeout(STORE_SECONDS, lambda: claim(message))
    own = own_failure(message).to_json()
    _call_with_timeout(ANNOUNCE_SECONDS, lambda: rendezvous.announce_early(own))
    return None


def announce_interruption(reason: str) -> None:
    """Stop the ranks on other machines, which this machine's launcher does not reach. This rank ends at once."""
    if distributed.ranks().on_several_machines and _shared_store is not None and not stopping.is_set():
        stopping.set()
        _call_with_timeout(STORE_SECONDS, lambda: claim(f"stopped by {reason}"))


@dataclass(frozen=True, kw_only=True)
class Failure(Stored):
    """An announced failure."""

    rank: int
    message: str
    host: str

    @property
    def is_own(self) -> bool:
        """Whether it is this rank that failed."""
        return self.rank == distributed.ranks().rank

    def describe(self) -> str:
        """Such as "rank 1: ..." or, on another machine, "rank 1 on node-b: ..."."""
        where = "" if distributed.ranks().is_local(self.rank) else f" on {self.host}"
        return f"rank {self.rank}{where}: {self.message}"


def own_failure(message: str) -> Failure:
    """A failure of this rank."""
    return Failure(rank=distributed.ranks().rank, message=message, host=socket.gethostname())


def claim(message: str) -> Failure:
    """The first failure, which is this one if no other has been announced."""
    return Failure.from_json(_failure_store().compare_set(rendezvous.FAILURE, "", own_failure(message).to_json()))


def _failure_store() -> RankStore:
    """The store in which the first failure is announced."""
    return default_store() if _shared_store is None else _shared_store


def wait_for_launcher() -> bool:
    """Wait for the launcher to end this process, as it does once the rank that reports its error has exited.

    Returns:
        True if this rank has to report its own error after all: there was no process group to agree in, and nothing has
        ended this process.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Event().wait(QUIET_SECONDS)
    return not distributed.connected()


def first_failure(message: str) -> str:
    """The message of the rank that failed first, which is the reason why all ranks end; `message` if it is this one."""
    message = explain_broken_connection(message) or message
    stopping.set()
    if not distributed.connected():
        return message
    try:
        _failure_store().set(_failed(distributed.ranks().rank, message), "")
        first = claim(message)
    except Exception:  # the rank that hosts the store has ended: it failed first
        return "rank 0: it ended, and the process group's store with it"
    return first.message if first.is_own else first.describe()  # its own may be of its watch: that others are stuck


def all_ranks_fail_with(message: str) -> bool:
    """Whether every rank fails with this error, so that no rank needs to be named. To be called after `first_failure`.

    Ranks that cannot communicate yet have the same configuration and files if they are on one machine.
    """
    me = distributed.ranks()
    if me.on_several_machines:
        return False
    if not distributed.connected():
        return me.is_local_main
    keys = [_failed(rank, message) for rank in range(me.world_size)]
    until = time.monotonic() + ALIKE_SECONDS
    with contextlib.suppress(Exception):  # the store has ended
        while time.monotonic() < until:
            if _failure_store().check(keys):
                return True
            threading.Event().wait(0.02)
    return False


def _failed(rank: int, message: str) -> str:
    return f"{FAILED}/{hashlib.sha256(message.encode(errors='replace')).hexdigest()[:16]}/{rank}"


def write_error(message: str) -> None:
    """Write this rank's error from a thread: sys.stderr may be locked."""
    text = f"error: [rank {distributed.ranks().rank}] {message}"
    launcher.leave_error(text)
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


# What torch's errors say of a connection whose other side has ended: gloo's, NCCL's, and the store's.
_BROKEN = re.compile(
    r"(RuntimeError|Dist\w*Error): .*("
    r"Connection (reset|closed) by peer|Broken pipe|(Read|Write) error \[|Connection timed out|No route to host|"
    r"remote process exited|ncclRemoteError|ncclSystemError|failed to recv, got 0 bytes)",
    re.IGNORECASE | re.DOTALL,
)


def is_broken_connection(text: str) -> bool:
    """Whether the text of an error of torch's is about a connection to another rank."""
    return _BROKEN.match(text) is not None


def explain_broken_connection(text: str) -> str | None:
    """The sentence to report instead of an error about a connection to another rank; None for other errors.

    A broken connection has a cause, and this process waits for it: the launcher, or the watch of the other ranks and
    machines, may end it meanwhile and report the cause.
    """
    if distributed.ranks().world_size == 1 or not is_broken_connection(text):
        return None
    until = time.monotonic() + CAUSE_SECONDS
    while time.monotonic() < until and not stopping.wait(FAILURE_POLL_SECONDS / 4):
        pass
    if _exiting.is_set():
        threading.Event().wait(QUIET_SECONDS)
    cause = distributed.ended_ranks() or " ".join(text.split())[:200]
    return (
        f"The connection to another rank broke: {cause}. A process has ended or the network has failed: see the "
        "end of the output on every machine, then start the run again with training.resume_from_checkpoint: true."
    )


def default_store() -> RankStore:
    """The store of the process group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


# --- watching the others --------------------------------------------------------------------------------------------


def set_failure_handler(on_failure: OnFailure | None, local_ranks: Mapping[int, tuple[int, float]]) -> None:
    """Set what this process does from now on when a rank fails.

    Args:
        on_failure: called with a message just before this process exits.
        local_ranks: process ids and times of creation of the other ranks on this machine, by rank.
    """
    global _on_failure, _local_ranks
    _on_failure, _local_ranks = on_failure, local_ranks
    stopping.clear()


def watch_other_ranks(on_failure: OnFailure | None, peers: Mapping[int, int], each_second: Callable[[], None]) -> None:
    """End this process soon after another rank has failed, even if the main thread is blocked in a collective.

    Args:
        on_failure: called with a message just before this process exits.
        peers: process ids of the other ranks of this machine, by rank.
        each_second: called before each check of the store.
    """
    store = _failure_store()
    while not stopping.wait(FAILURE_POLL_SECONDS):
        try:
            each_second()
            if not store.check([rendezvous.FAILURE]):
                continue
            failure = Failure.from_json(store.get(rendezvous.FAILURE))
        except Exception:
            if stopping.is_set():
                return
            if rendezvous.launcher_hosts_it():
                interrupt.request("the end of the launcher that hosts the ranks' store")
                rank, message = _wait_for_lost_peer(peers), "it ended without a checkpoint after its launcher had ended"
            else:
                rank, message = 0, "the rank that hosts the process group's store has ended"
            failure = Failure(rank=rank, message=message, host=os.environ.get("MASTER_ADDR", ""))
            if stopping.is_set():
                return
        exit_after(failure, on_failure)


def exit_after(failure: Failure, on_failure: OnFailure | None) -> None:
    """End this process because a rank has failed. If that one prints its error on another machine, print it here."""
    me = distributed.ranks()
    if me.is_local_main and not me.is_local(failure.rank):
        write_error(failure.describe())
    if on_failure is not None:
        on_failure(failure.describe())
    threading.Event().wait(FAILURE_POLL_SECONDS)  # let the failed rank print its error first
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # the main thread may be inside NCCL, where no exception can reach it


def process_start_times(peers: Mapping[int, int]) -> dict[int, tuple[int, float]]:
    """Process id and time of creation of each rank on this machine: ids alone are reused."""
    import psutil

    found = {}
    for rank, pid in peers.items():
        with contextlib.suppress(psutil.Error):
            found[rank] = (pid, psutil.Process(pid).create_time())
    return found


def exit_on_lost_machine(machine: Machine, why: str) -> None:
    """End this process, from a thread, because a machine of the run is lost and with it every collective.

    Args:
        why: the kernel's reason; empty if the machine has closed the connection.
    """
    if stopping.wait(FAILURE_POLL_SECONDS / 2):  # the run is over, or this rank reports a failure
        return
    message = machines.explain_loss(machine, why)
    first = _call_with_timeout(STORE_SECONDS, lambda: claim(message))  # the store may be on that machine
    if first is not None and not first.is_own:
        return  # a rank has reported the reason; the watch of failures ends this process
    _exiting.set()
    stopping.set()
    write_error(message)
    if _on_failure is not None:
        record = functools.partial(_on_failure, message, in_place_of_main=0 in machine.ranks)
        _call_with_timeout(STORE_SECONDS, record)  # the disk may be on that machine as well
    if first is None:
        _kill(_local_ranks)  # they have no way to notice, and a launcher would wait 30 s for each of them
    threading.Event().wait(2 * FAILURE_POLL_SECONDS)
    os._exit(1)


def _call_with_timeout(seconds: float, call: Callable[[], Result]) -> Result | None:
    """What `call` returns, or None if it fails or takes longer."""
    found: list[Result] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            found.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def exit_hung(
    on_failure: OnFailure | None,
    peers: Mapping[int, tuple[int, float]],
    message: str,
    silent: Sequence[int],
) -> None:
    """Report that ranks are missing and end this process, from any thread. Returns if another rank has failed first.

    Of the missing ranks, those of this machine that cannot even answer are ended before this one: a launcher would
    wait 30 s for each of them, and its own report names the rank that ended first.

    Args:
        on_failure: called with `message`, and with `in_place_of_main=True` if rank 0 cannot write its record.
        peers: process ids and times of creation of the other ranks on this machine, by rank.
        silent: the ranks that do not answer.
    """
    if not ((first := claim(message)).is_own and first.message == message):
        return
    write_error(message)
    if on_failure is not None:
        on_failure(message, in_place_of_main=0 in silent)
    _kill({rank: peers[rank] for rank in silent if rank in peers})
    threading.Event().wait(3 * FAILURE_POLL_SECONDS)  # the others have noticed by then: they end first
    os._exit(1)


def _kill(processes: Mapping[int, tuple[int, float]]) -> None:
    """Kill ranks of this machine, given their process ids and times of creation."""
    import psutil

    for pid, created in processes.values():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.create_time() == created:
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
        if stopping.wait(FAILURE_POLL_SECONDS) or lost:  # waits first: ranks may just end with the run
            return lost[0] if lost else distributed.ranks().rank
