"""Tests of finetune/bench/launch.py."""

from __future__ import annotations

import pytest

from finetune.bench import comm, launch
from finetune.bench.command import main
from finetune.bench.launch import default_world_sizes
from finetune.errors import RunError, UserError
from tests.helpers.bench import machine


def test_world_sizes_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    two = machine(monkeypatch, 2, "NVLink")
    comm.check_world(2, two)
    with pytest.raises(UserError, match="the number of visible GPUs is 2"):
        comm.check_world(4, two)
    with pytest.raises(UserError, match="two ranks or more"):
        comm.check_world(1, two)
    assert default_world_sizes(8) == [2, 4, 8] and default_world_sizes(3) == [2]
    assert default_world_sizes(1) == default_world_sizes(0) == [2]


REPORT = """\
E1122 00:36:07.367000 12 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0
Failures:
[1]:
  time      : 2026-01-01_00:00:00
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 10)
Root Cause (first observed failure):
[0]:
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 11)
"""


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        (REPORT.format(rank=3, code=-9), RunError, r"^rank 3 of 4 died \(SIGKILL\); the others were stopped$"),
        # Under load both are seen at once: the one that died, and the one that lost its peer.
        (
            "RuntimeError: Connection reset by peer\n" + REPORT.format(rank=1, code=-9).replace("-15", "1"),
            RunError,
            r"^rank 1 of 4 died \(SIGKILL\); the others were stopped$",
        ),
        ("error: [rank 1] no such file\n" + REPORT.format(rank=1, code=2), UserError, r"^\[rank 1\] no such file$"),
        ("error: CUDA ran out of memory\n" + REPORT.format(rank=1, code=1), RunError, "^CUDA ran out of memory$"),
        ("Traceback ...\nValueError: broken\n" + REPORT.format(rank=1, code=1).replace("-15", "1"), RunError, "broken"),
        (
            "Traceback ...\nValueError: broken\n" + REPORT.format(rank=1, code=1),
            RunError,
            r"code 1: Trace[^:]*: broken\s*$",
        ),
    ],
)
def test_the_first_failure_is_reported(said: str, kind: type, words: str) -> None:
    found = launch.failure_error(1, said, 4)
    assert type(found) is kind
    with pytest.raises(kind, match=words):
        raise found


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "There is one: `finetune bench comm`."),
        (["speed"], "unknown benchmark: `speed`"),
        (["comm", "--world-sizes", "two"], "--world-sizes: expected integers of at least 1, such as 1,2,4, got 'two'"),
        (["comm", "--runs", "0"], "--runs: expected an integer of at least 1, got '0'"),
        (["comm", "--world-sizes", "1"], "two ranks or more"),
        (["step"], "unknown benchmark: `step`"),
        (["comm", "--size", "4096"], "unknown option: `--size`"),
        (["comm", "--training.learning_rate", "1"], "training.learning_rate"),
        (["comm", "--world-sizes"], "expected one argument"),
    ],
)
def test_bad_input_is_reported_and_nothing_starts(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "ranks", lambda *arguments, **named: pytest.fail("ranks were started"))
    assert main(words) == 2
    assert expected in capsys.readouterr().err
