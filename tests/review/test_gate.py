"""The gate of `finetune review`: percentages that were computed by hand, what is missing, and exit codes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from finetune.review import command, gate
from tests.review import synthetic
from tests.review.test_reading import make_run

BASELINE = {
    "status": "done",
    "step_seconds_median": 0.2,
    "tokens_per_second_per_gpu": 1000.0,
    "losses": [9.0, 2.0],
    "eval_loss_after": 1.6,
}


def pair(folder: Path, **other: Any) -> list[str]:
    """Two runs: the baseline, and one with other values in run.json; None removes the key."""
    for name, changed in (("a", {}), ("b", other)):
        record = {key: value for key, value in (BASELINE | changed).items() if value is not None}
        (folder / name).mkdir()
        (folder / name / "run.json").write_text(json.dumps(record))
    return [str(folder / "a"), str(folder / "b")]


@pytest.mark.parametrize(
    ("changed", "options", "sentences"),
    [
        ({}, ("--max-slowdown", "0", "--max-loss-increase", "0"), []),
        ({"step_seconds_median": 0.21}, ("--max-slowdown", "5"), []),  # 5 %, which floating point makes a bit more
        (
            {"step_seconds_median": 0.212},
            ("--max-slowdown", "5"),
            ["b: step_seconds_median rose by 6.00 %, from 0.2 to 0.212; --max-slowdown allows 5 %."],
        ),
        ({"tokens_per_second_per_gpu": 950}, ("--max-slowdown", "5"), []),
        (
            {"tokens_per_second_per_gpu": 949, "step_seconds_median": 0.3},
            ("--max-slowdown", "5"),
            [
                "b: step_seconds_median rose by 50.00 %, from 0.2 to 0.3; --max-slowdown allows 5 %.",
                "b: tokens_per_second_per_gpu fell by 5.10 %, from 1000 to 949; --max-slowdown allows 5 %.",
            ],
        ),
        ({"step_seconds_median": 0.1, "tokens_per_second_per_gpu": 9000.0}, ("--max-slowdown", "0"), []),
        ({"losses": [1.0, 2.01]}, ("--max-loss-increase", "0.5"), []),
        ({"losses": [1.0, 2.01]}, ("--max-slowdown", "0"), []),  # what no option limits is not judged
        (
            {"losses": [1.0, 2.012], "eval_loss_after": 1.5},
            ("--max-loss-increase", "0.5"),
            ["b: the last of losses rose by 0.60 %, from 2 to 2.012; --max-loss-increase allows 0.5 %."],
        ),
        (
            {"losses": [1.0], "eval_loss_after": 1.64},
            ("--max-loss-increase", "0.5"),
            ["b: eval_loss_after rose by 2.50 %, from 1.6 to 1.64; --max-loss-increase allows 0.5 %."],
        ),
    ],
)
def test_a_run_that_is_worse_fails_with_the_reason(
    changed: dict[str, Any],
    options: tuple[str, ...],
    sentences: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main([*pair(tmp_path, **changed), *options]) == (1 if sentences else 0)
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("gate: ") == max(len(sentences), 1) and ("gate: passed" in printed) == (not sentences)
    assert all(f"gate: {sentence}" in printed for sentence in sentences), printed


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"step_seconds_median": None}, "--max-slowdown needs step_seconds_median, and run.json of b has no"),
        ({"tokens_per_second_per_gpu": "fast"}, "needs tokens_per_second_per_gpu, and run.json of b has no"),
        ({"losses": None}, "--max-loss-increase needs the last of losses, and run.json of b has no"),
        ({"losses": []}, "needs the last of losses, and run.json of b has no"),
        ({"losses": [1.0, math.nan]}, "needs the last of losses, and run.json of b has no"),
        ({"eval_loss_after": None}, "needs eval_loss_after, and run.json of b has no"),
        ({"eval_loss_after": {"x": 1.0}}, "needs eval_loss_after.x, and run.json of a has no"),
        ({"status": "failed"}, "b has not finished: its status is failed"),
    ],
)
def test_a_run_that_cannot_be_compared_is_named(
    changed: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--max-slowdown", "5", "--max-loss-increase", "0.5")
    assert command.main([*pair(tmp_path, **changed), *options]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_baseline_without_a_percentage_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = pair(tmp_path, losses=[0.0])
    assert command.main([b, a, "--max-loss-increase", "1"]) == 2
    assert "that of b is 0" in " ".join(capsys.readouterr().err.split())


def test_the_first_run_is_the_baseline_of_all_others(tmp_path: Path) -> None:
    runs = [{**BASELINE, "step_seconds_median": seconds} for seconds in (0.2, 0.3, 0.1, 0.25)]
    found = gate.compare({f"run{n}": run for n, run in enumerate(runs)}, {"--max-slowdown": 30})
    assert [(one.run, one.figure) for one in found if one.breached] == [("run1", "step_seconds_median")]
    changes = [one.change_percent for one in found if one.figure == "step_seconds_median"]
    assert changes == pytest.approx([50, -50, 25])


def test_evaluation_sets_are_compared_by_name() -> None:
    first, second = ({**BASELINE, "eval_loss_after": {"x": 1.0, "y": y}} for y in (2.0, 2.2))
    found = gate.compare({"a": first, "b": second}, {"--max-loss-increase": 5})
    assert [(one.figure, round(one.change_percent, 6)) for one in found if one.breached] == [("eval_loss_after.y", 10)]


def test_json_has_every_figure(tmp_path: Path) -> None:
    file = tmp_path / "review.json"
    folders = pair(tmp_path, tokens_per_second_per_gpu=800)
    assert command.main([*folders, "--max-slowdown", "5", "--json", str(file)]) == 1
    step, tokens = json.loads(file.read_text())["gate"]
    assert (step["figure"], step["change_percent"], step["breached"]) == ("step_seconds_median", 0, False)
    assert tokens == {
        **{"run": "b", "figure": "tokens_per_second_per_gpu", "baseline": 1000, "value": 800},
        **{"change_percent": -20, "option": "--max-slowdown", "limit_percent": 5, "breached": True},
    }
    assert command.main([*folders, "--json", str(file)]) == 0
    assert "gate" not in json.loads(file.read_text())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a", "--max-slowdown", "5"), "there is only one: a"),
        ((".", "b", "--max-slowdown", "5"), "the baseline must be one run"),
        (("a", "b", "--max-slowdown", "-1"), "expected a number of at least 0, got '-1'"),
        (("a", "b", "--max-loss-increase", "nan"), "of at least 0, got 'nan'"),
        (("a", "b", "--max-slowdown", "5%"), "of at least 0, got '5%'"),
    ],
)
def test_what_is_no_comparison_is_refused(
    arguments: tuple[str, ...],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pair(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert command.main(list(arguments)) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_finding_fails_beside_the_gate_only_if_strict(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name, record=BASELINE, slow={1: {"forward": 1.0}}, loss=synthetic.losses(20))
    arguments = [str(tmp_path / "a"), str(tmp_path / "b"), "--max-slowdown", "1"]
    assert command.main(arguments) == 0
    assert command.main([*arguments, "--strict"]) == 1
