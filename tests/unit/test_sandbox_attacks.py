"""What the kernel alone keeps in, without the Python stubs; and what the stubs keep in, through the shipped path."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from finetune.convert import sandbox, trace
from finetune.convert.command import convert
from finetune.convert.notebook.read import Refusal

pytestmark = pytest.mark.process

ATTACKS = Path(__file__).with_name("sandbox_attacks.py")
NEEDED = 60


def confined() -> bool:
    """Whether this kernel grants both profiles, asked in a process that ends."""
    program = f"import sys; sys.path.append({str(Path(sandbox.__file__).parent)!r})\nimport sandbox\n"
    program += "print(sandbox.confine(sandbox.LIBRARIES, '/tmp').complete)"
    return sandbox.run([sys.executable, "-I", "-S", "-c", program], seconds=60, output=99).output.strip() == b"True"


kernel = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not confined(), reason="the kernel confines nothing"
)


@kernel
@pytest.mark.parametrize("mode", ["pure", "libraries"])
def test_no_attack_reaches_outside_the_sandbox(mode: str, attacks: dict[str, list[str]], tmp_path: Path) -> None:
    assert len(attacks["did"]) >= NEEDED, "too few attacks work unconfined for a proof"
    assert set(attacks["all"]) - set(attacks["did"]) <= set(attacks["optional"])
    assert not run_attacks(mode, tmp_path / "place")["did"]


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


@kernel
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


@kernel
def test_a_conversion_is_confined_by_the_kernel() -> None:
    outcome = convert(Path(__file__).parents[2] / "examples" / "notebooks" / "full_text.ipynb")
    assert outcome.conversion.report["sandbox"] == "kernel"


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
@pytest.mark.parametrize("profile", [sandbox.PURE, sandbox.LIBRARIES], ids=["pure", "libraries"])
def test_the_filter_fits_the_kernel(machine: str, profile: sandbox.Profile) -> None:
    """Every jump ends inside the program, which ends with a verdict."""
    code = sandbox.program(profile, sandbox._MACHINES[machine], 1, files=True)
    steps = [(code[n], code[n + 2], code[n + 3]) for n in range(0, len(code), 8)]
    assert len(steps) < 4096 and steps[-1][0] == 6
    assert all(place + 1 + max(yes, no) < len(steps) for place, (what, yes, no) in enumerate(steps) if what != 6)


# --- the shipped path -------------------------------------------------------------------------------------------------

FIELD = """from dataclasses import dataclass
@dataclass(init=False, repr=False)
class C:
    x = 0
    __annotations__ = {"x or <ANY>": int}
same = C() == C()"""
FORK = "__import__('_posixsubprocess').fork_exec([b'/usr/bin/touch', b'MARK'], [b'/usr/bin/touch'], True, (), None, None, -1, -1, -1, -1, -1, -1, 2, 2, False, False, 0, None, None, None, -1, None, False)"  # fmt: skip  # noqa: E501
ESCAPES = {
    "a program by a field's name": FIELD.replace("<ANY>", FORK),
    "the cage lifted by a field's name": FIELD.replace("<ANY>", "__import__('gc').get_objects()"),
    "annotations by an import": "import json as __annotations__",
    "annotations by a pattern": "match 1:\n    case __annotations__:\n        pass",
    "an attribute by a pattern": "match len:\n    case object(__self__=x):\n        pass",
    "a class of classes": "C = ().__class__.__class__('C', (), {})",
    "a class of classes by map": "C = list(map(object.__class__, ['C'], [()], [{}]))",
    "globals by format": "x = '{0.__init__.__globals__}'.format(tokenizer)",
    "globals by format_map": "x = '{a.__init__.__globals__}'.format_map({'a': print})",
    "globals by format in a list": "x = list(map('{0.__globals__}'.format, [print]))",
    "globals by the class's format": "x = str.format('{0.__globals__}', print)",
    "globals by getattr": "x = getattr('{0.__globals__}', 'format')(print)",
    "globals in a width": "x = '{0:{1.__globals__}}'.format(1, print)",
    "globals by wraps": "import functools\nfunctools.wraps(print, assigned=('__globals__',))(lambda: 0)",
}


@pytest.mark.parametrize("escape", ESCAPES)
def test_known_escapes_are_refused(escape: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    source = ESCAPES[escape].replace("MARK", str(mark))
    traces = trace._run([{"statements": [(1, source)], "yaml": {}, "assumed": True}])
    assert traces[0]["failed"].get("1", "").startswith(("unsafe", "TypeError: wraps")), traces[0]["failed"]
    assert not mark.exists()


def test_a_notebook_with_an_escape_writes_nothing(tmp_path: Path) -> None:
    mark, path = tmp_path / "mark", tmp_path / "bad.ipynb"
    example = Path(__file__).parents[2] / "examples" / "notebooks" / "qlora_alpaca.ipynb"
    content = json.loads(example.read_text())
    cell = {"cell_type": "code", "metadata": {"__reduce__": "x"}, "outputs": [{"data": "<script>"}], "source": ""}
    content["cells"].insert(0, cell | {"source": FIELD.replace("<ANY>", FORK.replace("MARK", str(mark)))})
    path.write_text(json.dumps(content))
    convert(path)
    assert not mark.exists() and sorted(os.listdir(tmp_path)) == ["bad.ipynb"]


@pytest.mark.parametrize("answer", ["[]", "{}", '{"results": [1], "missing": []}', "[" * 99_999])
def test_an_answer_of_another_shape_is_refused(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "run", lambda *_, **__: sandbox.Finished(0, answer.encode(), b""))
    with pytest.raises(Refusal):
        trace._run([{}])


def test_a_kernel_that_does_not_confine_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    example = Path(__file__).parents[2] / "examples" / "notebooks" / "full_text.ipynb"
    missing = "stubs.main(lambda: ['seccomp: not here'])"
    program = trace._PROGRAM.replace("stubs.main(lambda: sandbox.confine(sandbox.PURE).missing)", missing)
    monkeypatch.setattr(trace, "_PROGRAM", program)
    report = convert(example).conversion.report
    assert report["sandbox"] == "stubs" and "seccomp: not here" in report["notes"][-1]
