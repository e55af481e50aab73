"""What the kernel keeps in."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.notebooks.oracle import sandbox
from tests.notebooks.oracle.marks import confined

ATTACKS = Path(__file__).parent / "sandbox_attacks.py"
NEEDED = 60


@confined
def test_no_attack_reaches_outside_the_sandbox(attacks: dict[str, list[str]], tmp_path: Path) -> None:
    assert len(attacks["did"]) >= NEEDED, "too few attacks work unconfined for a proof"
    assert set(attacks["all"]) - set(attacks["did"]) <= set(attacks["optional"])
    assert not run_attacks("confined", tmp_path / "place")["did"]


@pytest.fixture(scope="module")
def attacks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """All attacks, unconfined."""
    return run_attacks("none", tmp_path_factory.mktemp("unconfined") / "place")


def run_attacks(mode: str, folder: Path) -> dict[str, list[str]]:
    environment = {"ATTACK_SECRET": "a-secret-of-the-parent"}
    command = [sys.executable, "-I", str(ATTACKS), mode, str(folder)]
    done = sandbox.run(command, seconds=300, output=2**20, environment=environment)
    assert done.returncode == 0, done.errors.decode()
    return json.loads(done.output)


LIBRARIES = """
import json, os, socket, sys
import numpy, torch, transformers
model = torch.nn.Linear(64, 64)
model(torch.ones(8, 64)).sum().backward()
with open("written.txt", "w") as stream:
    stream.write(str(numpy.ones(2).sum()))
kind = [line.split()[2] for line in open("/proc/self/mounts") if line.split()[1] == os.getcwd()]
refused = {}
for name, attempt in {
    "write": lambda: open(MARK, "w"),
    "execute": lambda: os.execv("/bin/true", ["true"]),
    "fork": os.fork,
    "socket": socket.socket,
    "read": lambda: open(SECRET),
}.items():
    try:
        attempt()
    except OSError as error:
        refused[name] = error.errno
print(json.dumps({"refused": refused, "folder": os.getcwd(), "kind": kind, "environment": sorted(os.environ)}))
"""


@confined
def test_the_libraries_work_inside_and_reach_nothing_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_not_for_the_child")
    mark, secret, program = tmp_path / "mark", tmp_path / "secret", tmp_path / "program.py"
    secret.write_text("x")
    program.write_text(LIBRARIES.replace("MARK", repr(str(mark))).replace("SECRET", repr(str(secret))))
    done = sandbox.run_libraries(str(program), seconds=400)
    assert done.returncode == 0, done.errors.decode()
    found = json.loads(done.output.splitlines()[-1])
    assert set(found["refused"]) == {"write", "execute", "fork", "socket", "read"} and not mark.exists()
    assert "HF_TOKEN" not in found["environment"]
    assert not Path(found["folder"]).exists()
    if os.geteuid() == 0:
        assert found["kind"] == ["tmpfs"]


@pytest.mark.process
@pytest.mark.campaign
def test_time_and_output_are_bounded_from_outside() -> None:
    command = [sys.executable, "-I", "-S", "-c"]
    assert sandbox.run([*command, "while True: pass"], seconds=0.5, output=10).why == "seconds"
    endless = sandbox.run([*command, "while True: print('x' * 1000)"], seconds=60, output=10_000)
    assert endless.why == "output" and len(endless.output) <= 10_001
    assert sandbox.run([*command, "print(input())"], b"given", seconds=60, output=10).output == b"given\n"
    silent = "import os; os.close(1); os.close(2)\nwhile True: pass"
    assert sandbox.run([*command, silent], seconds=0.5, output=10).why == "seconds"
    leaves_one = "import os, time\nif os.fork() == 0: time.sleep(600)"  # which keeps its output open
    assert sandbox.run([*command, leaves_one], seconds=60, output=10).why == ""


def test_a_filled_folder_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    deep = folder
    for _ in range(30):
        deep = deep / "d"
    deep.mkdir(parents=True)
    (deep / "file").touch()
    (folder / "d" / "out").symlink_to(tmp_path)
    (folder / "d").chmod(0)
    sandbox.remove(str(folder))
    assert not folder.exists() and tmp_path.exists()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_fits_the_kernel(machine: str) -> None:
    """Every jump ends inside the program, which ends with a verdict."""
    code = sandbox.program(sandbox._MACHINES[machine], 1)
    steps = [(code[n], code[n + 2], code[n + 3]) for n in range(0, len(code), 8)]
    assert len(steps) < 4096 and steps[-1][0] == 6
    assert all(place + 1 + max(yes, no) < len(steps) for place, (what, yes, no) in enumerate(steps) if what != 6)
