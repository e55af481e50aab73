"""Kernel confinement for a process that executes untrusted code.

`confine(folder)` is called in the process itself, after its imports and before any untrusted code. From then on,
seccomp allows a list of system calls, Landlock a list of files, and resource limits bound time, memory and files; none
of it can be undone. `run` starts such a process and limits it from outside: wall time, bytes of output, environment.
Uses the standard library only, because it also runs under `python -S`.

It refuses programs, processes, sockets, signals to other processes, tracing, new mounts and namespaces, links, file
attributes and every system call that is not listed. A confined process ends with the one that started it. It can read
the interpreter's standard library, installed packages and what their shared libraries need, start threads, and write
below one folder. A private tmpfs of limited size is mounted over that folder if the kernel permits it (containers often
do not). Otherwise it is a temporary folder that `run_libraries` creates and removes. `run_libraries` also watches the
process from outside: memory, threads, and files in that folder.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

SECONDS, MEMORY = 300, 24 * 2**30  # CPU time; address space
FILE_SIZE, OPEN_FILES = 256 * 2**20, 1024


@dataclass(frozen=True)
class Confinement:
    """What the kernel granted. `missing` gives a reason for each part not in force; empty if all are."""

    seccomp: bool = False
    landlock: int = 0  # ABI version; 0 if it is not in force
    tmpfs: bool = False  # mounted over the writable folder
    missing: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return not self.missing


def confine(writable: str, *, empty: bool = True) -> Confinement:
    """Confine this process permanently. `writable`: the folder that it may write to, `empty`: and finds empty if the
    kernel permits it.

    The process must have one thread: Landlock applies to the calling thread and those it starts later. Raises
    RuntimeError otherwise. Closes all file descriptors above 2.
    """
    if threading.active_count() > 1 or _threads() > 1:
        raise RuntimeError("cannot confine a process with several threads: confine it before it starts them")
    os.closerange(3, 1 << 16)
    _limit()
    if not sys.platform.startswith("linux"):
        return Confinement(missing=[f"{sys.platform} has neither seccomp nor Landlock"])
    machine = _MACHINES.get(os.uname().machine)
    if machine is None or sys.byteorder != "little" or sys.maxsize < 2**32:
        return Confinement(missing=[f"system calls of {os.uname().machine} are not known"])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG: no orphan, which nobody would stop
    if libc.prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS
        return Confinement(missing=[f"no_new_privs: {_reason()}"])
    missing = []
    tmpfs = empty and _mount_tmpfs(libc, writable)
    version = _landlock(libc, writable)
    if version < 3:  # before version 3, read-only files could be truncated
        why = "version 3 is needed (Linux 6.2)" if version > 0 else os.strerror(-version)
        missing.append(f"Landlock: {why}")
    seccomp = _seccomp(libc, program(machine, os.getpid()))
    if seccomp:
        missing.append(f"seccomp: {seccomp}")
    return Confinement(seccomp=not seccomp, landlock=max(version, 0), tmpfs=tmpfs, missing=missing)


FOLDER_BYTES, FOLDER_FILES = 2**30, 50_000  # in the writable folder
_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_NO_SUID, _NO_DEVICES, _NO_EXEC, _RECURSIVE, _PRIVATE = 2, 4, 8, 0x4000, 0x40000


def _mount_tmpfs(libc: ctypes.CDLL, folder: str) -> bool:
    """Mount an empty tmpfs over `folder`, visible only to this process. Returns whether the kernel permitted it."""
    if libc.unshare(_NEW_MOUNTS if os.geteuid() == 0 else _NEW_MOUNTS | _NEW_USER):
        return False
    if libc.mount(b"none", b"/", None, ctypes.c_ulong(_RECURSIVE | _PRIVATE), None):
        return False
    flags = ctypes.c_ulong(_NO_SUID | _NO_DEVICES | _NO_EXEC)
    limits = f"size={FOLDER_BYTES},nr_inodes={FOLDER_FILES},mode=700".encode()
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, limits):
        return False
    os.chdir(folder)  # the working directory was the folder under the mount
    return True


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def _reason() -> str:
    return os.strerror(ctypes.get_errno())


def _limit() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    limits = {"AS": MEMORY, "CPU": SECONDS, "FSIZE": FILE_SIZE, "CORE": 0}
    limits |= {"NOFILE": OPEN_FILES, "MSGQUEUE": 0, "MEMLOCK": 0}
    for name, limit in limits.items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
        except (ValueError, OSError, AttributeError):
            pass  # not supported here, or already lower


# --- Landlock ---------------------------------------------------------------------------------------------------------

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG, _REFER = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 13
_READ = _READ_FILE | _READ_DIR
_WRITE = _READ | _WRITE_FILE | _TRUNCATE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _REFER
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # number of file rights by ABI version

_SYSTEM_FILES = (
    "/lib /lib64 /usr/lib /usr/lib64 /usr/local/lib /usr/share/zoneinfo /usr/share/locale /etc/ld.so.cache"
    " /etc/localtime /proc/self /proc/cpuinfo /proc/meminfo /proc/stat /proc/filesystems"
    " /proc/sys/vm/overcommit_memory /sys/devices/system /dev/urandom /dev/random /dev/zero"
).split()


def _readable() -> list[str]:
    """The paths that it may read."""
    standard = os.path.dirname(os.path.realpath(os.__file__))
    installed = [path for path in sys.path if os.path.isabs(path)]
    return [standard, sys.prefix, sys.base_prefix, *installed, *_own_packages(), *_SYSTEM_FILES]


def _own_packages() -> list[str]:
    """The source of this project's packages, which a development installation keeps outside site-packages."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    return [os.path.join(root, name) for name in ("finetune", "patches")]


def _landlock(libc: ctypes.CDLL, writable: str) -> int:
    """Restrict this process to these files. Returns the ABI version in force, or the negated error number."""
    version = libc.syscall(444, None, ctypes.c_size_t(0), 1)
    if version <= 0:
        return -ctypes.get_errno()
    handled = (1 << _RIGHTS.get(version, 16)) - 1
    network = 3 if version >= 4 else 0  # TCP bind and connect
    scoped = 3 if version >= 6 else 0  # abstract Unix sockets and signals
    attributes = struct.pack("=QQQ", handled, network, scoped)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = libc.syscall(444, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        return -ctypes.get_errno()
    rules = {path: _READ for path in _readable()}
    rules |= {"/dev/null": _READ | _WRITE_FILE, writable: _WRITE}
    try:
        for path, rights in rules.items():
            failed = _allow(libc, ruleset, path, rights & handled)
            if failed:
                return -failed
        return -ctypes.get_errno() if libc.syscall(446, ruleset, 0) else version
    finally:
        os.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> int:
    """Add one rule. Returns the error number, or 0, also if the path does not exist."""
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        if not os.path.isdir(path):
            rights &= _OF_A_FILE
        rule = struct.pack("=Qi", rights, opened)
        return ctypes.get_errno() if libc.syscall(445, ruleset, 1, rule, 0) else 0
    finally:
        os.close(opened)


# --- seccomp ----------------------------------------------------------------------------------------------------------

# Number of each system call on x86-64 and on 64-bit ARM; `-` for none.
_NUMBERS = """
read 0 63; write 1 64; readv 19 65; writev 20 66; pread64 17 67; pwrite64 18 68; close 3 57; close_range 436 436;
fstat 5 80; newfstatat 262 79; stat 4 -; lstat 6 -; statx 332 291; lseek 8 62; mmap 9 222; munmap 11 215;
mprotect 10 226; mremap 25 216; madvise 28 233; brk 12 214; rt_sigaction 13 134; rt_sigprocmask 14 135;
rt_sigreturn 15 139; sigaltstack 131 132; futex 202 98; get_robust_list 274 100; set_robust_list 273 99;
set_tid_address 218 96; rseq 334 293; exit 60 93; exit_group 231 94; getpid 39 172; gettid 186 178; getuid 102 174;
geteuid 107 175; getgid 104 176; getegid 108 177; clock_gettime 228 113; clock_getres 229 114;
clock_nanosleep 230 115; nanosleep 35 101; gettimeofday 96 169; time 201 -; times 100 153; getrusage 98 165;
setitimer 38 103; getitimer 36 102; sched_yield 24 124; sched_getaffinity 204 123; getcpu 309 168; uname 63 160;
sysinfo 99 179; getrandom 318 278; restart_syscall 219 128; ioctl 16 29; fcntl 72 25; poll 7 -; ppoll 271 73;
select 23 -; pselect6 270 72; prlimit64 302 261; getrlimit 97 163; tgkill 234 131; kill 62 129; open 2 -; openat 257 56;
access 21 -; faccessat 269 48; faccessat2 439 439; readlink 89 -; readlinkat 267 78; getdents64 217 61; getcwd 79 17;
dup 32 23; dup2 33 -; dup3 292 24; statfs 137 43; fstatfs 138 44; pipe 22 -; pipe2 293 59; eventfd2 290 19;
epoll_create1 291 20; epoll_ctl 233 21; epoll_wait 232 -; epoll_pwait 281 22; timerfd_create 283 85;
timerfd_settime 286 86; timerfd_gettime 287 87; clone 56 220; mkdir 83 -; mkdirat 258 34; unlink 87 -; unlinkat 263 35;
rmdir 84 -; rename 82 -; renameat 264 38; renameat2 316 276; ftruncate 77 46; fallocate 285 47; fsync 74 82;
fdatasync 75 83; flock 73 32; fadvise64 221 223; copy_file_range 326 285; sendfile 40 71; membarrier 324 283;
get_mempolicy 239 236; mbind 237 235; set_mempolicy 238 237; chmod 90 -; fchmod 91 52; fchmodat 268 53;
utimensat 280 88; umask 95 166; prctl 157 167; msync 26 227; mincore 27 232; getppid 110 173; sched_getparam 143 121;
sched_getscheduler 145 120; getpriority 140 141; arch_prctl 158 -; sched_setaffinity 203 122; getgroups 115 158;
clone3 435 435; io_uring_setup 425 425; io_uring_enter 426 426; io_uring_register 427 427; futex_waitv 449 449;
ptrace 101 117; process_vm_readv 310 270; process_vm_writev 311 271; kexec_load 246 104; kexec_file_load 320 294;
init_module 175 105; finit_module 313 273; delete_module 176 106; bpf 321 280; userfaultfd 323 282; mount 165 40;
umount2 166 39; pivot_root 155 41; chroot 161 51; unshare 272 97; setns 308 268; keyctl 250 219; add_key 248 217;
request_key 249 218; open_by_handle_at 304 265; execveat 322 281; pidfd_getfd 438 438; pidfd_send_signal 424 424;
process_madvise 440 440; move_mount 429 429; fsopen 430 430; fsmount 432 432; open_tree 428 428; mount_setattr 442 442;
reboot 169 142; swapon 167 224; swapoff 168 225; acct 163 89; settimeofday 164 170; clock_settime 227 112;
clock_adjtime 305 266; adjtimex 159 171; sethostname 170 161; iopl 172 -; ioperm 173 -
"""
_ALLOWED = """
read write readv writev pread64 pwrite64 close close_range fstat lseek munmap mremap madvise brk rt_sigaction
rt_sigprocmask rt_sigreturn sigaltstack futex futex_waitv get_robust_list set_robust_list set_tid_address rseq exit
exit_group getpid gettid getppid getuid geteuid getgid getegid getgroups clock_gettime clock_getres clock_nanosleep
nanosleep gettimeofday time times getrusage setitimer getitimer sched_yield getcpu uname sysinfo getrandom
restart_syscall poll ppoll select pselect6 arch_prctl getrlimit dup dup2 dup3
newfstatat stat lstat statx access faccessat faccessat2 readlink readlinkat getdents64 getcwd statfs fstatfs
mmap mprotect open openat pipe pipe2 eventfd2 epoll_create1 epoll_ctl epoll_wait epoll_pwait timerfd_create
timerfd_settime timerfd_gettime mkdir mkdirat unlink unlinkat rmdir rename renameat renameat2 ftruncate fallocate fsync
fdatasync flock fadvise64 copy_file_range sendfile membarrier get_mempolicy mbind set_mempolicy umask msync mincore
""".split()
# Report success without doing anything: libraries set modes and times of their files, which Landlock does not cover.
_PRETENDED = "chmod fchmod fchmodat utimensat".split()
# Only an attack makes these calls: kill the process. Libraries probe io_uring and clone3, so those return ENOSYS.
_DEADLY = """
ptrace process_vm_readv process_vm_writev kexec_load kexec_file_load init_module finit_module delete_module bpf
userfaultfd mount umount2 pivot_root chroot unshare setns keyctl add_key request_key open_by_handle_at execveat
pidfd_getfd pidfd_send_signal process_madvise move_mount fsopen fsmount open_tree mount_setattr reboot swapon swapoff
acct settimeofday clock_settime clock_adjtime adjtimex sethostname iopl ioperm
""".split()
_NOT_THERE = "clone3 io_uring_setup io_uring_enter io_uring_register".split()
_NEWEST = 450  # above the numbers listed; any later call returns ENOSYS, as on an older kernel

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of _NUMBERS, AUDIT_ARCH
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06

_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1034)  # duplicate, flags, locks; not owners, signals or leases
_IOCTL = (0x5401, 0x5413, 0x5421, 0x5450, 0x5451)  # terminal queries, blocking mode, close-on-exec
_PRCTL = (3, 15, 16, 0x53564D41)  # names of threads and of memory
_THREAD, _NAMESPACES = 0x00010000, 0x7E020080  # CLONE_THREAD; CLONE_NEW*

Instruction = tuple[int, int, int, int]


def _when(argument: int, values: Iterable[int], mask: int = 0xFFFFFFFF, half: int = 0) -> list[Instruction]:
    """Continue if the masked half of an argument is one of `values`; return EPERM otherwise."""
    chosen = list(values)
    tests = [(_EQUAL, len(chosen) - place, 0, value) for place, value in enumerate(chosen)]
    return [(_LOAD, 0, 0, 16 + 8 * argument + 4 * half), (_AND, 0, 0, mask), *tests, _answer(errno.EPERM)]


def _answer(error: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | error)


def _checked(process: int) -> dict[str, list[Instruction]]:
    """Calls that are allowed for some arguments."""
    own = (0, process)
    return {
        "ioctl": _when(1, _IOCTL),
        "fcntl": _when(1, _FCNTL),
        "prctl": _when(0, _PRCTL),
        "kill": _when(0, [process]),
        "tgkill": _when(0, [process]),
        "sched_getaffinity": _when(0, own),
        "prlimit64": _when(0, own) + _when(2, [0]) + _when(2, [0], half=1),  # get only
        "clone": _when(0, [_THREAD], mask=_THREAD) + _when(0, [0], mask=_NAMESPACES),
        "sched_setaffinity": _when(0, own),
    }


def program(machine: tuple[int, int], process: int) -> bytes:
    """The BPF program."""
    column, architecture = machine
    numbers = {name: own[column] for name, *own in (item.split() for item in _NUMBERS.split(";"))}
    code: list[Instruction] = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, architecture),  # 32-bit calls have different numbers
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 0, 1, 0x40000000),  # as does the x32 ABI
        (_RETURN, 0, 0, _KILL),
    ]

    def on(names: Iterable[str], answer: Instruction) -> None:
        for name in names:
            if numbers[name] != "-":
                code.extend([(_EQUAL, 0, 1, int(numbers[name])), answer])

    on(_ALLOWED, (_RETURN, 0, 0, _ALLOW))
    for name, checks in _checked(process).items():
        if numbers[name] != "-":
            code.extend([(_EQUAL, 0, len(checks) + 1, int(numbers[name])), *checks, (_RETURN, 0, 0, _ALLOW)])
    on(_PRETENDED, _answer(0))
    on(_DEADLY, (_RETURN, 0, 0, _KILL))
    on(_NOT_THERE, _answer(errno.ENOSYS))
    code += [(_AT_LEAST, 0, 1, _NEWEST), _answer(errno.ENOSYS), _answer(errno.EPERM)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _seccomp(libc: ctypes.CDLL, filters: bytes) -> str:
    """Install the program. Returns the error message, or ''."""
    buffer = ctypes.create_string_buffer(filters, len(filters))
    described = struct.pack("@HP", len(filters) // 8, ctypes.addressof(buffer))
    return _reason() if libc.prctl(22, 2, described, 0, 0) else ""  # PR_SET_SECCOMP, a filter


# --- the parent's side, whose larger imports would slow down each confined process ------------------------------------


@dataclass(frozen=True)
class Finished:
    """How a process ended. `why` is empty, or the limit that it exceeded: `seconds`, `output`, or what the caller
    watches."""

    returncode: int
    output: bytes
    errors: bytes
    why: str = ""


PYTHON = (sys.executable, "-s", "-P")  # isolated, as by -I, which would also ignore the seed in the environment


def run(
    command: Sequence[str],
    given: bytes = b"",
    *,
    seconds: float,
    output: int,
    environment: dict[str, str] | None = None,
    folder: str | None = None,
    exceeds: Callable[[int], str] = lambda process: "",
) -> Finished:
    """Run a command in a new session and kill its process group at the end. Reads at most `output` bytes of output.

    `exceeds` is asked several times per second for the limit that the process with this id exceeds, or "".
    """
    import subprocess

    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment(environment or {}),
        cwd=folder or os.path.abspath(os.sep),
        start_new_session=True,
    )
    over = threading.Event()
    found: list[bytes] = [b"", b""]

    def read(place: int, stream: IO[bytes], limit: int) -> None:
        found[place] = stream.read(limit + 1)
        if len(found[place]) > limit:
            over.set()
            _end(process)

    def write() -> None:
        try:
            with process.stdin as stream:  # type: ignore[union-attr]
                stream.write(given)
        except OSError:
            pass  # it exited before it read everything

    reader = threading.Thread(target=read, args=(0, process.stdout, output), daemon=True)
    workers = [
        reader,
        threading.Thread(target=write, daemon=True),
        threading.Thread(target=read, args=(1, process.stderr, 2**16), daemon=True),
    ]
    for worker in workers:
        worker.start()
    why = ""
    try:
        why = _wait(process, reader, seconds, exceeds)
    finally:
        _end(process)
        process.wait()
    for worker in workers:
        worker.join(5)
    for stream in (process.stdout, process.stderr):
        stream.close()  # type: ignore[union-attr]
    return Finished(process.returncode, found[0], found[1], "output" if over.is_set() else why)


def _wait(
    process: subprocess.Popen[bytes], reader: threading.Thread, seconds: float, exceeds: Callable[[int], str]
) -> str:
    """Wait until it exits or exceeds a limit, which is returned."""
    import subprocess

    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        reader.join(min(left, 0.1))  # its output usually ends with it, which this notices at once: `wait` polls
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0 if reader.is_alive() else min(left, 0.1))
            return ""
        if why := exceeds(process.pid):
            return why
    return "seconds"


def _environment(given: dict[str, str]) -> dict[str, str]:
    """Only SYSTEMROOT is inherited, which Windows needs to start a process. The seed: sets have one order in all."""
    inherited = {name: os.environ[name] for name in ("SYSTEMROOT",) if name in os.environ}
    return inherited | {"PYTHONHASHSEED": "0"} | given


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    except OSError:
        pass  # it has already exited


def for_libraries(folder: str) -> dict[str, str]:
    """The environment of a process with the installed packages and no folder but this one."""
    names = dict.fromkeys(("HOME", "TMPDIR", "HF_HOME", "XDG_CACHE_HOME"), folder)
    return names | {"HF_HUB_OFFLINE": "1", "LANG": "C.UTF-8", "USER": "sandbox", "PYTHONDONTWRITEBYTECODE": "1"}


def run_libraries(path: str, given: bytes = b"", *, seconds: float, output: int = 2**24) -> Finished:
    """Run a Python file with the installed packages, confined. It can write only to its working directory, which
    is removed afterwards. If the kernel does not grant the whole profile, nothing runs (exit code 70)."""
    import tempfile

    folder = tempfile.mkdtemp(prefix="finetune-sandbox-")

    def exceeds(process: int) -> str:
        return excess(process) or _filled(folder)

    command = [*PYTHON, os.path.abspath(__file__), folder, os.path.abspath(path)]
    limits = {"seconds": seconds, "output": output}
    try:
        return run(command, given, **limits, environment=for_libraries(folder), folder=folder, exceeds=exceeds)
    finally:
        remove(folder)


NOT_CONFINED = "not run, because the kernel cannot confine it"
RESIDENT = 8 * 2**30  # bytes; RLIMIT_AS has to be larger, because torch reserves more than it uses
THREADS = 4096  # libraries start some for each processor; RLIMIT_NPROC does not hold for root


def excess(process: int) -> str:
    """`memory` or `threads` if a process uses too much; "" also if this system does not report it."""
    try:
        with open(f"/proc/{process}/status", encoding="ascii", errors="replace") as stream:
            found = dict(line.split(":", 1) for line in stream if ":" in line)
        kibibytes = sum(int(found[name].split()[0]) for name in ("VmRSS", "VmSwap"))
        return "memory" if kibibytes * 1024 > RESIDENT else "threads" if int(found["Threads"]) > THREADS else ""
    except (OSError, KeyError, ValueError, IndexError):
        return ""


def _filled(folder: str) -> str:
    """`files` if a folder holds too much. It is empty seen from here if a tmpfs, which has its own limits, is mounted
    over it."""
    size = number = 0
    try:
        for root, folders, files in os.walk(folder):
            number += len(folders) + len(files)
            size += sum(os.lstat(os.path.join(root, name)).st_size for name in files[:FOLDER_FILES])
            if number > FOLDER_FILES or size > FOLDER_BYTES:
                return "files"
    except OSError:
        pass  # it changes meanwhile; the next look sees the rest
    return ""


def remove(folder: str) -> None:
    """Remove a folder filled by hostile code, whatever its depth and modes. Follows no links."""
    pending, number = [folder], 0
    while pending:
        current = pending[-1]
        os.chmod(current, 0o700)
        for entry in list(os.scandir(current)):
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
            elif current == folder:
                pending.append(entry.path)
            else:  # move it to the top, so that no path becomes too long
                number += 1
                os.chmod(entry.path, 0o700)
                moved = os.path.join(folder, f".{number}-{os.urandom(4).hex()}")
                os.rename(entry.path, moved)
                pending.insert(1, moved)
        if pending[-1] == current:
            os.rmdir(current)
            pending.pop()


def main(folder: str, path: str, *, empty: bool = True) -> None:
    """`python -s -P sandbox.py FOLDER FILE`: run a Python file confined."""
    with open(path, "rb") as stream:
        code = compile(stream.read(), path, "exec")
    granted = confine(folder, empty=empty)
    if not granted.complete:
        sys.stderr.write(f"{NOT_CONFINED}: {'; '.join(granted.missing)}\n")
        raise SystemExit(70)
    sys.argv = [path]
    # Its own copy of the builtins: what untrusted code sets in the module does not change this program.
    exec(code, {"__name__": "__main__", "__file__": path, "__builtins__": dict(vars(builtins))})


if __name__ == "__main__":
    main(*sys.argv[1:])
