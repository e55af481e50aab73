"""Attacks on the sandbox, run by test_sandbox.py as a program: `python -I sandbox_attacks.py MODE FOLDER`.

Each attack runs in a forked process, confined by the kernel (MODE is `confined`) or not at all (`none`). What it did outside is looked for afterwards: in its folder, in this process (its
memory, limits, signals), in sockets that listen here, in what it wrote to its output. The names of those that did
something are printed as JSON. Uses the standard library only.
"""
# ruff: noqa: E501, F401  (an attack is one line, and uses what is imported here)

import _posixsubprocess
import array
import atexit
import codecs
import contextlib
import ctypes
import dbm.dumb
import fcntl
import gc
import importlib.machinery
import importlib.util
import io
import json
import logging.handlers
import mmap
import os
import pickle
import platform
import re
import resource
import select
import shelve
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import types
import weakref
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
_spec = importlib.util.spec_from_file_location("sandbox", HERE / "sandbox.py")
sandbox = importlib.util.module_from_spec(_spec)
sys.modules["sandbox"] = sandbox
_spec.loader.exec_module(sandbox)

LIBC = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
ATTACKS = {}
OPTIONAL = set()  # those that not every kernel or container lets through unconfined
SECRET = os.urandom(12).hex()
MEMORY = ctypes.create_string_buffer(b"old", 8)


class Place:
    """What one attack is given."""

    def __init__(self, folder):
        self.folder, self.mark, self.victim = folder, f"{folder}/mark", f"{folder}/victim"
        self.parent = os.getppid()


def attack(function=None, *, optional=False):
    def register(made):
        ATTACKS[made.__name__] = made
        if optional:
            OPTIONAL.add(made.__name__)
        return made

    return register(function) if function else register


def touch(path):
    with open(path, "w") as stream:
        stream.write("x")


def got(text="GOT"):
    os.write(1, text.encode())


def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


def syscall(number, *args):
    return check(LIBC.syscall(*[ctypes.c_long(item) if isinstance(item, int) else item for item in (number, *args)]))


# --- files ------------------------------------------------------------------------------------------------------------


def simple(name, source, optional=False):
    code = compile(source, name, "exec")

    def run(p):
        exec(code, globals() | {"p": p})

    run.__name__ = name
    attack(run, optional=optional)


for _line in """
open_write: touch(p.mark)
os_open: os.open(p.mark, os.O_CREAT | os.O_WRONLY)
append: open(p.victim, "a").write("x")
truncate: os.truncate(p.victim, 0)
rename: os.rename(p.victim, p.mark)
hard_link: os.link(p.victim, p.mark)
symbolic_link: os.symlink("/etc", p.mark)
write_through_a_symlink: open(p.folder + "/link", "w").write("x")
read_through_a_symlink: got(open(p.folder + "/to_secret").read())
read_a_secret: got(open(p.folder + "/secret").read())
unlink: os.unlink(p.victim)
mkdir: os.mkdir(p.mark)
rmdir: os.rmdir(p.folder + "/sub")
mkfifo: os.mkfifo(p.mark)
chmod: os.chmod(p.victim, 0o777)
chown: os.chown(p.victim, 12345, 12345)
utime: os.utime(p.victim, (1, 1))
xattr: os.setxattr(p.victim, "user.mark", b"x")
read_descriptor_fchmod: os.fchmod(p.readable, 0o777)
inherited_descriptor: os.write(p.inherited, b"x")
descriptor_through_proc: open(f"/proc/{p.parent}/fd/{p.inherited}", "w").write("x")
sqlite: sqlite3.connect(p.mark).execute("create table t (x)").connection.commit()
sqlite_attach: sqlite3.connect(":memory:").execute("attach ? as a", (p.mark,)).connection.execute("create table a.t (x)")
dbm_dumb: dbm.dumb.open(p.mark, "c").close()
shelve_open: shelve.Shelf(dbm.dumb.open(p.mark, "c")).close()
logging_file: logging.handlers.RotatingFileHandler(p.mark).emit(logging.makeLogRecord({"msg": "x"}))
temporary_file: tempfile.mkstemp(dir=p.folder)
zip_file: zipfile.ZipFile(p.mark, "w").writestr("a", "b")
zip_extract: zipfile.ZipFile(io.BytesIO(p.archive)).extractall(p.folder)
tar_file: tarfile.open(p.mark, "w").close()
copy_file: shutil.copy(p.victim, p.mark)
move_tree: shutil.move(p.folder + "/sub", p.mark)
codecs_open: codecs.open(p.mark, "w", "utf-8").write("x")
file_io: io.FileIO(p.mark, "w").write(b"x")
path_write: Path(p.mark).write_text("x")
bytecode_cache: importlib.machinery.SourceFileLoader("m", p.folder + "/module.py").set_data(p.mark, b"x")
import_hook: sys.meta_path.insert(0, types.SimpleNamespace(find_spec=lambda *_: touch(p.mark))); __import__("not_there")
source_loader: importlib.machinery.SourceFileLoader("m", p.folder + "/module.py").load_module()
extension_loader: ctypes.CDLL(p.folder + "/module.so") and got()
mapped_file: m = mmap.mmap(os.open(p.victim, os.O_RDWR), 3); m[:3] = b"new"
core_file: resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999)); os.chdir(p.folder); touch("mark")
""".strip().splitlines():
    simple(*_line.split(": ", 1))


# --- ways through Python ----------------------------------------------------------------------------------------------

for _name, _source in {
    "pickle_reduce": "class A:\n    def __reduce__(self):\n        return os.mkdir, (p.mark,)\npickle.loads(pickle.dumps(A()))",
    "generator_frame": "def g():\n    yield\nx = g()\nx.gi_frame.f_globals['touch'](p.mark)",
    "subclasses": "[c for c in object.__subclasses__() if c.__name__ == '_wrap_close'][0].__init__.__globals__['mkdir'](p.mark)",
    "decorator": "@lambda f: touch(p.mark)\ndef f():\n    pass",
    "metaclass": "class M(type):\n    def __new__(cls, *a):\n        touch(p.mark)\n        return type.__new__(cls, *a)\nclass A(metaclass=M):\n    pass",
    "sys_modules": "sys.modules['posix'].mkdir(p.mark)",
    "weakref_callback": "class A: pass\na = A()\nw = weakref.ref(a, lambda _: touch(p.mark))\ndel a\ngc.collect()",
    "destructor": "class A:\n    def __del__(self):\n        touch(p.mark)\na = A()\ndel a",
    "at_exit": "atexit.register(touch, p.mark)\natexit._run_exitfuncs()",
    "thread": "t = threading.Thread(target=touch, args=(p.mark,))\nt.start()\nt.join()",
    "signal_handler": "signal.signal(signal.SIGALRM, lambda *_: touch(p.mark))\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\ntime.sleep(0.05)",
    "garbage_objects": "[m for m in gc.get_objects() if isinstance(m, types.ModuleType) and m.__name__ == 'posix'][0].mkdir(p.mark)",
    "dataclass_field": "import dataclasses\nC = type('C', (), {'x': 0, '__annotations__': {'x or __import__(\"os\").mkdir(' + repr(p.mark) + ')': int}})\nC = dataclasses.dataclass(init=False, repr=False)(C)\nC() == C()",
    "code_object": "exec((lambda: 0).__code__.replace(co_code=compile('touch(p.mark)', '', 'exec').co_code, co_names=('touch', 'p', 'mark'), co_consts=(None,), co_flags=0, co_stacksize=9))",
    "trace_function": "sys.settrace(lambda *_: touch(p.mark))\n(lambda: 0)()",
    "audit_hook": "sys.addaudithook(lambda name, _: name == 'x' and os.mkdir(p.mark))\nsys.audit('x')",
    "regular_expression_callback": "re.sub('x', lambda m: touch(p.mark) or '', 'x')",
}.items():
    simple(_name, _source)

# --- programs and processes -------------------------------------------------------------------------------------------

for _name, _source in {
    "fork_exec": "subprocess.Popen(['/bin/mkdir', p.mark], close_fds=False).wait()",
    "posixsubprocess": "r, w = os.pipe()\nos.waitpid(_posixsubprocess.fork_exec([b'/bin/mkdir', p.mark.encode()], [b'/bin/mkdir'], True, (w,), None, None, -1, -1, -1, -1, -1, -1, r, w, False, False, 0, None, None, None, -1, None, False), 0)",
    "posix_spawn": "os.waitpid(os.posix_spawn('/bin/mkdir', ['mkdir', p.mark], {}), 0)",
    "system": "os.system('/bin/mkdir ' + p.mark)",
    "libc_system": "LIBC.system(b'/bin/mkdir ' + p.mark.encode())",
    "execv": "os.execv('/bin/mkdir', ['mkdir', p.mark])",
    "fork": "c = os.fork()\nif not c:\n    touch(p.mark)\n    os._exit(0)\nos.waitpid(c, 0)",
    "fork_alone": "c = os.fork()\nif not c:\n    got()\n    os._exit(0)\nos.waitpid(c, 0)",
    "memfd_execveat": "f = os.memfd_create('x')\nos.write(f, open('/bin/mkdir', 'rb').read())\nos.execve(f, ['mkdir', p.mark], {})",
    "loaded_program": "os.execv('/lib64/ld-linux-x86-64.so.2', ['ld', '/bin/mkdir', p.mark])"
    if X86
    else "os.execv('/bin/mkdir', ['mkdir', p.mark])",
    # signals to others
    "kill_parent": "os.kill(p.parent, signal.SIGUSR1)",
    "kill_group": "os.killpg(os.getpgid(p.parent), signal.SIGUSR1)",
    "kill_all_of_group": "os.kill(0, signal.SIGUSR1)",
    "queue_signal": "check(LIBC.sigqueue(p.parent, signal.SIGUSR1, ctypes.c_void_p(0)))",
    "process_descriptor_signal": "signal.pidfd_send_signal(os.pidfd_open(p.parent), signal.SIGUSR1)",
    "thread_signal": "syscall(234 if X86 else 131, p.parent, p.parent, int(signal.SIGUSR1))",
    "signal_by_owner": "r, w = os.pipe()\nfcntl.fcntl(r, 8, p.parent)\nfcntl.fcntl(r, 10, int(signal.SIGUSR1))\nfcntl.fcntl(r, fcntl.F_SETFL, 0o20000)\nos.write(w, b'x')",
    # other processes
    "limits_of_parent": "resource.prlimit(p.parent, resource.RLIMIT_CORE, (0, 77))",
    "priority_of_parent": "os.setpriority(os.PRIO_PROCESS, p.parent, 3)",
    "processors_of_parent": "os.sched_setaffinity(p.parent, {min(os.sched_getaffinity(p.parent))})\ngot()",
    "memory_of_parent": "f = os.open(f'/proc/{p.parent}/mem', os.O_WRONLY)\nos.pwrite(f, b'new', ctypes.addressof(MEMORY))",
    "environment_of_parent": "got(open(f'/proc/{p.parent}/environ').read())",
    "command_of_parent": "open(f'/proc/{p.parent}/cmdline').read() and got()",
}.items():
    simple(_name, _source)


@attack
def memory_of_parent_by_a_call(p):
    data = ctypes.create_string_buffer(b"new", 3)
    pair = [(ctypes.c_size_t * 2)(ctypes.addressof(item), 3) for item in (data, MEMORY)]
    syscall(311 if X86 else 271, p.parent, ctypes.byref(pair[0]), 1, ctypes.byref(pair[1]), 1, 0)


@attack
def trace_parent(p):
    syscall(101 if X86 else 117, 0x4206, p.parent, 0, 0)  # PTRACE_SEIZE, which does not stop it
    got()


# --- sockets ----------------------------------------------------------------------------------------------------------

for _name, _source in {
    "tcp": "socket.create_connection(('127.0.0.1', p.port))",
    "udp": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', p.udp))",
    "unix": "socket.socket(socket.AF_UNIX).connect(p.folder + '/../listener')",
    "abstract": "socket.socket(socket.AF_UNIX).connect(p.abstract)",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).bind((0, 0))\ngot()",
    "socket_pair": "socket.socketpair()\ngot()",
    "bound_socket": "socket.socket(socket.AF_UNIX).bind(p.mark)",
    "log_socket": "logging.handlers.DatagramHandler('127.0.0.1', p.udp).emit(logging.makeLogRecord({}))",
}.items():
    simple(_name, _source)

# --- calls of the kernel ----------------------------------------------------------------------------------------------


@attack
def raw_call(p):
    syscall(258 if X86 else 34, -100, p.mark.encode(), 0o755)  # mkdirat


@attack
def openat2(p):
    how = struct.pack("QQQ", os.O_CREAT | os.O_WRONLY, 0o644, 0)
    syscall(437, -100, p.mark.encode(), how, len(how))


@attack(optional=True)
def x32_interface(p):
    syscall(0x40000000 + 83, p.mark.encode(), 0o755)


@attack(optional=True)
def calls_of_32_bits(p):
    if CODE is None:
        raise OSError
    path = p.mark.encode() + b"\0"
    ctypes.memmove(CODE + 512, path, len(path))
    ctypes.CFUNCTYPE(ctypes.c_long)(CODE)()


@attack(optional=True)
def io_uring(p):
    syscall(425, 4, ctypes.create_string_buffer(120))
    got()


@attack(optional=True)
def user_faults(p):
    syscall(323 if X86 else 282, 0)
    got()


@attack(optional=True)
def performance_events(p):
    syscall(298 if X86 else 241, ctypes.create_string_buffer(struct.pack("II", 1, 112), 112), 0, -1, -1, 0)
    got()


@attack(optional=True)
def bpf_map(p):
    syscall(321 if X86 else 280, 0, struct.pack("IIIII", 2, 4, 4, 1, 0) + bytes(100), 72)
    got()


@attack(optional=True)
def keyring(p):
    syscall(250 if X86 else 219, 1, 0)
    got()


@attack(optional=True)
def new_namespace(p):
    syscall(272 if X86 else 97, 0x10000000)
    got()


@attack(optional=True)
def new_root(p):
    os.chroot(p.folder)
    got()


@attack(optional=True)
def mount_tmpfs(p):
    if LIBC.unshare(0x20000) or LIBC.mount(b"none", b"/", None, 0x44000, None):  # a private copy of the mounts
        raise OSError
    check(LIBC.mount(b"tmpfs", p.folder.encode() + b"/sub", b"tmpfs", 0, None))
    got()


@attack
def file_notifications(p):
    check(LIBC.inotify_add_watch(LIBC.inotify_init(), p.folder.encode(), 0xFFF))
    got()


@attack
def shared_memory(p):
    check(LIBC.shmget(0x5EED, 4096, 0o1600))
    got()


@attack
def message_queue(p):
    check(LIBC.msgget(0x5EED, 0o1600))
    got()


@attack
def semaphores(p):
    check(LIBC.semget(0x5EED, 1, 0o1600))
    got()


@attack(optional=True)
def posix_queue(p):
    check(LIBC.mq_open(b"/finetune-attack", 0o102, 0o600, None))
    LIBC.mq_unlink(b"/finetune-attack")
    got()


@attack
def memory_file(p):
    os.memfd_create("x")
    got()


@attack(optional=True)
def handle_of_a_file(p):
    handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0), 136)
    number = ctypes.c_int()
    check(LIBC.name_to_handle_at(-100, p.victim.encode(), handle, ctypes.byref(number), 0))
    opened = check(LIBC.open_by_handle_at(os.open(p.folder, os.O_RDONLY), handle, os.O_RDWR))
    os.write(opened, b"x")


@attack(optional=True)
def typed_into_the_terminal(p):
    fcntl.ioctl(0, 0x5412, b"x")


@attack
def terminal_settings(p):
    fcntl.ioctl(0, 0x5414, struct.pack("HHHH", 7, 7, 0, 0))  # TIOCSWINSZ


@attack
def own_limits_raised(p):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    got()


@attack
def outliving_the_parent(p):
    check(LIBC.prctl(1, 0, 0, 0, 0))  # PR_SET_PDEATHSIG off
    got()


# --- time and memory --------------------------------------------------------------------------------------------------


@attack
def much_memory(p):
    mmap.mmap(-1, 30 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    got()


@attack
def large_file(p):
    with open(p.mark, "wb") as stream:
        stream.truncate(1 << 40)


# --- running them -----------------------------------------------------------------------------------------------------

CODE = None
if X86:
    _page = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40, prot=7)  # below 4 GiB
    CODE = ctypes.addressof(ctypes.c_char.from_buffer(_page))
    if CODE < 1 << 31:  # creat(path, 0o755) by int 0x80
        _page[:19] = (
            b"\x53\xb8\x08\x00\x00\x00\xbb" + struct.pack("I", CODE + 512) + b"\xb9\xed\x01\x00\x00\xcd\x80\x5b"
        )
        _page[19:20] = b"\xc3"
    else:
        CODE = None


def snapshot(folder):
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        about = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() and about.st_size < 1 << 20 else b""
        attributes = os.listxattr(path, follow_symlinks=False)
        found[str(path)] = (about.st_mode, about.st_uid, about.st_mtime_ns, about.st_size, content, attributes)
    return found


class Watch:
    """What is looked at from outside: sockets, signals, limits, memory and a terminal of this process."""

    def __init__(self, folder):
        self.signals = 0
        signal.signal(signal.SIGUSR1, self._signal)
        self.tcp, self.unix, self.hidden = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX), None
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.unix.bind(f"{folder}/listener")
        self.hidden = socket.socket(socket.AF_UNIX)
        self.abstract = f"\0finetune-{os.getpid()}"
        self.hidden.bind(self.abstract)
        for item in (self.unix, self.hidden):
            item.listen(8)
        self.terminal, self.slave = os.openpty()

    def _signal(self, *_):
        self.signals += 1

    def seen(self):
        """Whether something happened since the last time, which is undone."""
        found = bool(self.signals)
        self.signals = 0
        for item in (self.tcp, self.unix, self.hidden):
            while select.select([item], [], [], 0)[0]:
                item.accept()[0].close()
                found = True
        while select.select([self.udp], [], [], 0)[0]:
            self.udp.recv(100)
            found = True
        if MEMORY.value != b"old":
            MEMORY.value, found = b"old", True
        if resource.getrlimit(resource.RLIMIT_CORE)[1] == 77 or os.getpriority(os.PRIO_PROCESS, 0) == 3:
            found = True
        size = fcntl.ioctl(self.slave, 0x5413, bytes(8))
        waiting = array.array("i", [0])
        fcntl.ioctl(self.slave, 0x541B, waiting)
        if select.select([self.terminal], [], [], 0)[0]:  # the echo of what was typed
            os.read(self.terminal, 100)
            found = True
        if size[:2] != b"\0\0":
            fcntl.ioctl(self.slave, 0x5414, bytes(8))
            found = True
        return found or bool(waiting[0])


def make_folder(root, name):
    folder = root / name
    (folder / "sub").mkdir(parents=True)
    (folder / "victim").write_text("old")
    (folder / "secret").write_text(SECRET)
    (folder / "link").symlink_to(folder / "victim")
    (folder / "to_secret").symlink_to(folder / "secret")
    (folder / "module.py").write_text(f"open({str(folder / 'mark')!r}, 'w').write('x')\n")
    source = [item for item in sys.modules.values() if str(getattr(item, "__file__", "")).endswith(".so")]
    shutil.copy(_ctypes_file(source), folder / "module.so")
    return folder


def _ctypes_file(loaded):
    return loaded[0].__file__


def attempt(name, mode, root, watch):
    """Run one attack; whether it did something outside."""
    folder = make_folder(root, name)
    before = snapshot(folder)
    reader, writer = os.pipe()
    inherited = os.open(folder / "victim", os.O_WRONLY | os.O_APPEND)
    readable = os.open(folder / "victim", os.O_RDONLY)
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            place = Place(str(folder))
            place.inherited, place.readable, place.archive = inherited, readable, ARCHIVE
            place.port, place.udp = watch.tcp.getsockname()[1], watch.udp.getsockname()[1]
            place.abstract = watch.abstract
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            signal.alarm(20)
            os.dup2(watch.slave, 0)
            os.dup2(writer, 1)
            os.dup2(writer, 2)
            if mode != "none":
                confine(root)
            ATTACKS[name](place)
        os._exit(0)
    os.close(writer)
    output = b""
    while block := os.read(reader, 4096):
        output += block
    os.waitpid(child, 0)
    for item in (reader, inherited, readable):
        os.close(item)
    effect = watch.seen() or snapshot(folder) != before or b"GOT" in output or SECRET.encode() in output
    return effect or os.environ["ATTACK_SECRET"].encode() in output


def confine(root):
    granted = sandbox.confine(str(root / "writable"))
    if not granted.complete:
        raise RuntimeError(granted)


def main():
    mode, root = sys.argv[1], Path(sys.argv[2])
    (root / "writable").mkdir(parents=True)
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # signals to the group reach this process only
    watch = Watch(root)
    did = [name for name in ATTACKS if attempt(name, mode, root, watch)]
    sys.stdout.write(json.dumps({"did": did, "all": list(ATTACKS), "optional": sorted(OPTIONAL)}))


_buffer = io.BytesIO()
with zipfile.ZipFile(_buffer, "w") as _zip:
    _zip.writestr("mark", "x")
ARCHIVE = _buffer.getvalue()

if __name__ == "__main__":
    main()
