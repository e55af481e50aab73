"""The judge of TRL's own tests: how it merges what ranks report, and when it ends with an error."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import assets, expectations, runner


class Rank:
    """In place of a process."""

    def __init__(self, code: int | None = 0) -> None:
        self.code = code

    def poll(self) -> int | None:
        return self.code


def follow(tmp_path: Path, *ranks: list[dict[str, Any]], timeout: float = 300, running: bool = False) -> runner.Session:
    """A session after ranks that have written these events."""
    given = argparse.Namespace(trainer="finetune", ranks=len(ranks), timeout=timeout, json=tmp_path / "result.json")
    session = runner.Session(given, tmp_path)
    for number, events in enumerate(ranks):
        names = list(dict.fromkeys(event["test"] for event in events))
        lines = [{"event": "collected", "tests": names, "others": {"TestDFTLoss": 1}}, *events]
        (tmp_path / f"rank-{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (tmp_path / f"rank-{number}.log").write_text("last words")
    started: Any = [Rank(None if running else 0) for _ in ranks]
    runner.Follower(session, tmp_path, started).follow()
    return session


def test_of(name: str, outcome: str | None, reason: str = "", at: float = 0.0) -> list[dict[str, Any]]:
    """Events of one test; without an outcome it has not ended."""
    start = {"event": "start", "test": name, "time": at}
    end = {"event": "end", "test": name, "time": at + 1, "outcome": outcome, "reason": reason, "details": ""}
    return [start, end] if outcome else [start]


test_of.__test__ = False  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (["passed"], "passed"),
        (["passed", "passed"], "passed"),
        (["refused", "refused"], "refused"),
        (["passed", "refused"], "failed"),
        (["skipped", "failed"], "failed"),
    ],
)
def test_ranks_must_agree(outcomes: list[str], expected: str, tmp_path: Path) -> None:
    session = follow(tmp_path, *(test_of("test_x", outcome, f"why {outcome}") for outcome in outcomes))
    result = session.results["test_x"]
    assert result.outcome == expected and result.reason.endswith(f"why {outcomes[-1]}")
    assert ("disagree" in result.reason) == (len(set(outcomes)) > 1)


def test_disagreement_leaves_the_rest_to_fresh_ranks(tmp_path: Path) -> None:
    later = test_of("test_y", "passed")
    session = follow(tmp_path, test_of("test_x", "passed") + later, test_of("test_x", "refused") + later)
    assert session.left() == ["test_y"]


def test_rank_that_waits_for_another_is_ended(tmp_path: Path) -> None:
    """The one has left the test long ago, the other still waits in it."""
    session = follow(tmp_path, test_of("test_x", None), test_of("test_x", "failed", "why"), running=True)
    assert session.results["test_x"].outcome == "failed"
    assert session.results["test_x"].reason == "rank 0 waits for one that failed it: why"


def test_process_that_dies_fails_its_test(tmp_path: Path) -> None:
    session = follow(tmp_path, test_of("test_x", "passed") + test_of("test_y", None))
    assert session.results["test_x"].outcome == "passed"
    assert session.results["test_y"].outcome == "failed" and session.results["test_y"].details == "last words"


@pytest.mark.parametrize(
    ("name", "outcome", "code"),
    [
        ("test_train_model", "passed", 0),
        ("test_train_model", "refused", 1),  # must pass
        ("test_train[trl-internal-testing/tiny-GptOssForCausalLM]", "refused", 0),
        ("test_train[trl-internal-testing/tiny-Qwen2ForCausalLM-2.5]", "refused", 1),
        ("test_train_dft_loss", "failed", 1),
        ("test_train_padding_free", "skipped", 0),
    ],
)
def test_exit_code(name: str, outcome: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session = follow(tmp_path, test_of(name, outcome, "the reason"))
    assert runner.report(session, 1.0) == code
    shown = capsys.readouterr().out
    assert f"{outcome}  {name}\n" in shown and "the reason" in shown and "left out: 1 of TestDFTLoss" in shown
    assert json.loads((tmp_path / "result.json").read_text())["counts"][outcome] == 1


def test_required_tests_have_stand_ins() -> None:
    """At least 40 tests must pass, and the Hub assets that they name are known."""
    assert len(expectations.REQUIRED) >= 40 and len(set(expectations.REQUIRED)) == len(expectations.REQUIRED)
    named = {name.partition("[")[2].rstrip("]") for name in expectations.REQUIRED if "/" in name}
    assert named <= set(assets.known())


def test_rows_are_as_many_as_trl_counts() -> None:
    """17 rows to train on and 2 to evaluate; every stand-in of a conversation ends with the assistant."""
    sentences = assets.zen()
    assert len(sentences) - assets.EVAL_ROWS == 17
    for configurations in assets.configurations(sentences).values():
        assert {len(rows) for rows in configurations.values()} == {19}
        for row in [row for rows in configurations.values() for row in rows if "messages" in row]:
            assert row["messages"][-1]["role"] == "assistant"
