"""Two machines on one host: network namespaces with real addresses, own host names, processes and disks.

Needs Linux, root, iproute2 (`ip`, `tc`) and util-linux (`unshare`). Everything that is made is removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

NAMES = ("node-a", "node-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "link0"
# The namespace's own view: a name, disks of its own, then the program, which ends with its node.
_ENTER = """
set -e
hostname "$1"; shift
while [ "$1" != -- ]; do mount --bind "$1" "$2"; shift 2; done
shift
exec "$@"
"""


def why_not() -> str | None:
    """Why namespaces cannot be made here; None if they can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "needs root, for network namespaces"
    missing = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)} (iproute2, util-linux)"
    done = subprocess.run(["unshare", "--net", "--uts", "--pid", "--fork", "true"], capture_output=True, check=False)
    return None if done.returncode == 0 else "this kernel or container allows no namespaces"


@dataclass
class Node:
    """One of the two machines."""

    name: str
    address: str
    namespace: str
    disks: Mapping[Path, Path] = field(default_factory=dict)  # own folder -> where the node sees it

    def start(self, command: Sequence[str | Path], *, env: Mapping[str, str], cwd: Path, log: Path) -> Started:
        """Start a program on this node; what it prints goes to `log`."""
        binds = [str(path) for pair in self.disks.items() for path in pair]
        inside = ["bash", "-c", _ENTER, "enter", self.name, *binds, "--", *map(str, command)]
        # Own processes: none of the other node can be seen, and all end with the first one.
        own = ["unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL"]
        with log.open("ab") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *own, *inside],
                stdout=file, stderr=subprocess.STDOUT, env=dict(env), cwd=cwd, start_new_session=True,
            )  # fmt: skip
        return Started(self, process, log)

    def link(self, state: str) -> None:
        """Set this node's end of the link "up" or "down"."""
        _ip("-n", self.namespace, "link", "set", INTERFACE, state)

    def limit(self, mbit_per_s: float | None) -> None:
        """Limit what this node sends; None for no limit."""
        tc = ["tc", "-n", self.namespace, "qdisc"]
        subprocess.run([*tc, "del", "dev", INTERFACE, "root"], capture_output=True, check=False)
        if mbit_per_s is not None:
            # The largest frame of the virtual link is 64 KiB: a smaller burst would drop it.
            rate = ["rate", f"{mbit_per_s}mbit", "burst", "256kb", "latency", "400ms"]
            subprocess.run([*tc, "add", "dev", INTERFACE, "root", "tbf", *rate], check=True)


@dataclass
class Started:
    """A program on a node, with everything that it starts."""

    node: Node
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def text(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace")

    def ranks(self) -> list[int]:
        """Process ids, as this host numbers them, of the ranks that a launcher has started on the node."""
        found = []
        listed = subprocess.run(
            ["ip", "netns", "pids", self.node.namespace], capture_output=True, text=True, check=False
        )
        for pid in map(int, listed.stdout.split()):
            with contextlib.suppress(OSError):
                if b"\0LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(pid)
        return found

    def kill(self) -> None:
        """SIGKILL everything on the node at once: it ends as one that loses its power, but for the kernel, which closes
        the connections."""
        with contextlib.suppress(OSError, ValueError):  # it has ended already
            os.kill(self.first(), signal.SIGKILL)

    def first(self) -> int:
        """The node's first process, by this host's number: the program itself. With it the kernel ends all others."""
        (child,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(child)  # of `unshare`, which has one

    def end(self) -> None:
        """Leave nothing behind."""
        self.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def two_nodes(tag: str, disks: Sequence[Mapping[Path, Path]] = ({}, {})) -> Iterator[tuple[Node, Node]]:
    """Two nodes with a link between them, each with an address and a name that both can resolve.

    Args:
        tag: part of the namespaces' names, to keep two of these apart.
        disks: of each node: own folder -> the existing folder in whose place the node sees it.
    """
    nodes = tuple(
        Node(name, address, f"{tag}-{name}", dict(own))
        for name, address, own in zip(NAMES, ADDRESSES, disks, strict=True)
    )
    hosts = "127.0.0.1 localhost\n" + "".join(f"{node.address} {node.name}\n" for node in nodes)
    try:
        for node in nodes:
            _ip("netns", "add", node.namespace)
            folder = Path("/etc/netns", node.namespace)  # `ip netns exec` shows these files in place of those of /etc
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(hosts)
        first, second = nodes
        pair = ["type", "veth", "peer", "name", INTERFACE, "netns", second.namespace]
        _ip("link", "add", INTERFACE, "netns", first.namespace, *pair)
        for node in nodes:
            _ip("-n", node.namespace, "address", "add", f"{node.address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _ip("-n", node.namespace, "link", "set", interface, "up")
        yield first, second
    finally:
        for node in nodes:
            remove(node)


def remove(node: Node) -> None:
    """Remove a node's namespace, if there is one, and its processes."""
    for pid in processes(node):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", node.namespace], capture_output=True, check=False)
    shutil.rmtree(Path("/etc/netns", node.namespace), ignore_errors=True)


def processes(node: Node) -> list[int]:
    """All process ids on a node, as this host numbers them."""
    command = ["ip", "netns", "pids", node.namespace]
    return [int(pid) for pid in subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
