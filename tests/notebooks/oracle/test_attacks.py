"""A report of another shape never passes a script, and a notebook is stopped if it takes too much."""

from __future__ import annotations

import copy
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks.oracle import compare as witness
from tests.notebooks.oracle import sandbox
from tests.notebooks.oracle.marks import confined
from tests.notebooks.oracle.stand_ins import ADAPTER, GIVEN, MODEL, SETTINGS

# --- reports of another shape -----------------------------------------------------------------------------------------

NOTEBOOK = json.dumps({"cells": [{"cell_type": "code", "source": "from unsloth import FastLanguageModel"}]})
RUN = {
    "columns": {"text": "text"},
    "settings": {**dict.fromkeys([*SETTINGS, "global batch", "max_length", "packing"], 9.0), "optim_args": None},
    "model": dict.fromkeys(MODEL, "x"),
    "lora": dict.fromkeys(ADAPTER, 1),
    "given": dict.fromkeys(GIVEN, "x"),
    "rows": [[[5, 6, 7], [-100, 6, 7]]],
    "eos": 9,
    "failures": ["cell 2, line 1: OSError: no disk at 0x7f10"],
    "empty": False,
}


def verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: Any, ours: Any, wrap: Any = None) -> Any:
    """The witness's outcome if its two sides write these reports. `wrap` makes the bytes of a report."""

    def run(program: str, given: bytes, **_: Any) -> sandbox.Finished:
        job = json.loads(given)
        found = theirs if "cells" in job else {"mine": ours}
        report = json.dumps({"key": job["key"], "found": found}).encode()
        return sandbox.Finished(0, report if wrap is None else wrap(report), b"")

    monkeypatch.setattr(sandbox, "run_libraries", run)
    path = tmp_path / "mine.ipynb"
    path.write_text(NOTEBOOK)
    return witness.check(path, {"mine.py": ""})


def changed(**values: Any) -> Callable[[Any], None]:
    return lambda run: run.update(values)


def without(*path: str) -> Callable[[Any], None]:
    def change(run: Any) -> None:
        for name in path[:-1]:
            run = run[name]
        del run[path[-1]]

    return change


INCOMPLETE: dict[str, Callable[[Any], None]] = {
    **{f"without {name}": without(name) for name in ("columns", "settings", "model", "given", "rows")},
    **{f"without the setting {name}": without("settings", name) for name in RUN["settings"]},
    **{f"without the model's {name}": without("model", name) for name in MODEL},
    **{f"without the adapter's {name}": without("lora", name) for name in ADAPTER},
    **{f"without the given {name}": without("given", name) for name in GIVEN},
    "no rows": changed(rows=[]),
    "rows of nothing": changed(rows=[[[], []]]),
    "rows without a label": changed(rows=[[[5, 6], [-100, -100]]]),
    "rows of text": changed(rows=["ab"]),
    "rows of true": changed(rows=[[[True], [True]]]),
    "rows of two lengths": changed(rows=[[[5, 6], [6]]]),
    "settings of a list": changed(settings=[]),
    "an adapter of text": changed(lora="none"),
    "a kind of columns": changed(columns={"text": "a program"}),
    "columns of a list": changed(columns=["text"]),
}


@pytest.mark.parametrize("change", INCOMPLETE.values(), ids=list(INCOMPLETE))
def test_an_incomplete_report_never_passes(
    change: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the script's report lacks the same."""
    run = copy.deepcopy(RUN)
    change(run)
    for theirs, ours in (([run], [run]), ([run], [RUN]), ([RUN], [run])):
        assert verdict(tmp_path, monkeypatch, theirs, ours).status == "could-not-run"


def test_equal_reports_pass_and_others_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict(tmp_path, monkeypatch, [RUN], [RUN]).status == "passed"
    assert verdict(tmp_path, monkeypatch, [RUN, RUN], [RUN]).status == "could-not-run"
    for name in ("settings", "model", "lora", "given"):
        for key in RUN[name]:
            ours = copy.deepcopy(RUN)
            ours[name][key] = 2.5
            found = verdict(tmp_path, monkeypatch, [RUN], [ours])
            assert found.status == "differs" and key in found.reason


@pytest.mark.parametrize(
    "wrap",
    [
        lambda report: report + report,
        lambda report: b"PASSED\n" + report,
        lambda report: b"",
        lambda report: b"[" * 1_000_000,
        lambda report: b"[" + report + b"]",
        lambda report: b'"passed"',
        lambda report: b"\xff\xfe",
        lambda report: json.dumps(json.loads(report) | {"key": "0" * 32}).encode(),
        lambda report: json.dumps({"found": json.loads(report)["found"]}).encode(),
    ],
)
def test_what_is_not_one_report_with_the_key_is_not_read(
    wrap: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verdict(tmp_path, monkeypatch, [RUN], [RUN], wrap).status == "could-not-run"


def test_a_script_fails_only_where_the_notebook_fails_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, status in (("OSError: no disk at 0x7f99", "could-not-run"), ("TypeError: x", "differs")):
        found = verdict(tmp_path, monkeypatch, [RUN], [{"refused": error}])
        assert found.status == status and error in found.reason
    assert verdict(tmp_path, monkeypatch, [RUN | {"failures": None}], [RUN]).status == "could-not-run"
    assert verdict(tmp_path, monkeypatch, [RUN | {"empty": "no"}], [RUN]).status == "could-not-run"


def test_only_an_end_token_that_the_script_adds_is_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longer = {**RUN, "rows": [[[5, 6, 7, 9], [-100, 6, 7, 9]]]}
    other = {**RUN, "rows": [[[5, 6, 7, 8], [-100, 6, 7, 8]]]}
    assert verdict(tmp_path, monkeypatch, [RUN], [longer]).status == "passed"
    assert verdict(tmp_path, monkeypatch, [longer], [RUN]).status == "differs", "the script lost it"
    assert verdict(tmp_path, monkeypatch, [RUN], [other]).status == "differs"
    assert verdict(tmp_path, monkeypatch, [{**RUN, "eos": 8}], [{**longer, "eos": 9}]).status == "differs"
    assert verdict(tmp_path, monkeypatch, [RUN], [{**longer, "eos": None}]).status == "differs"


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 99_999, '{"cells": [1]}', '{"cells": [{"cell_type": "code"}]}'])
def test_a_notebook_that_is_none_is_not_compared(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.ipynb").write_text(text)
    assert witness.check(tmp_path / "mine.ipynb", {"mine.py": ""}).status == "could-not-run"


# --- too much ---------------------------------------------------------------------------------------------------------

GREEDY = {
    "memory": "held = [bytearray(10 << 20) for _ in range(200)]\nimport time\ntime.sleep(999)",
    "threads": "import threading, time\nthreading.stack_size(65536)\n"
    "[threading.Thread(target=time.sleep, args=(999,)).start() for _ in range(300)]",
    "seconds": "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass",
    "output": "import os\nwhile True: os.write(1, b'x' * 65536)",
}
STOPPED = {"itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"}


@confined
@pytest.mark.parametrize("why", [*GREEDY, "itself"])
def test_who_takes_too_much_is_stopped(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "RESIDENT", 2**29)
    monkeypatch.setattr(sandbox, "THREADS", 100)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = tmp_path / "program.py"
    program.write_text(GREEDY.get(why) or STOPPED[why])
    seconds = 1 if why in ("seconds", "itself") else 60
    done = sandbox.run_libraries(str(program), seconds=seconds, output=2**20)
    assert done.why == ("seconds" if why == "itself" else why) and done.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == ["program.py"]


def test_a_folder_with_too_much_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no tmpfs can be mounted, nothing else limits the number of files."""
    for number in range(8):
        (tmp_path / str(number)).write_bytes(b"x" * 100)
    assert not sandbox._filled(str(tmp_path)) and not sandbox._filled(str(tmp_path / "missing"))
    for name, limit in (("FOLDER_FILES", 7), ("FOLDER_BYTES", 799)):
        with monkeypatch.context() as patched:
            patched.setattr(sandbox, name, limit)
            assert sandbox._filled(str(tmp_path)) == "files"


ORPHAN = """
import sys, threading
from pathlib import Path
from tests.notebooks.oracle import sandbox
threading.Thread(target=sandbox.run_libraries, args=(sys.argv[1],), kwargs={"seconds": 600}, daemon=True).start()
def confined():
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            if "Seccomp:\\t2" in Path(f"/proc/{child}/status").read_text():
                return child
while not (child := confined()): pass
print(child, flush=True)
input()
"""


@confined
def test_who_is_confined_ends_with_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text("import time\nwhile True: time.sleep(999)")
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ORPHAN, str(program)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    try:
        assert select.select([child], [], [], 60)[0], "it outlives the process that started it"
    finally:
        os.close(child)
