"""Recorded runs of the real trainer: each planted fault is named and no other, and healthy runs have no finding.

`python -m tests.review.record` records them; `RECORDED_ON_GPUS` come from runs on two H200s, `ruined` from the model of
the demo, whose held-out loss is 0.01, trained for 24 more steps with a learning rate of 0.5, and `answers` from
SmolLM2-135M-Instruct on the rows of examples/pretrained, of which five of six answers were emptied and kept.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.review import run as runs
from finetune.review.assemble import review
from finetune.review.rules import RULES, learning, memory, ranks, routing, speed, straggler, timing
from finetune.review.run import Run
from tests.review import record

RECORDED_ON_GPUS: dict[str, str | None] = {
    name: rule
    for name, rule in {
        "h200-healthy-two": None,
        "h200-healthy-one": None,
        "h200-memory": "memory-near-limit",
        "h200-slow-rank": "straggler",
    }.items()
    if (record.FIXTURES / name).exists()
}
EXPECTED = (
    {name: one.rule for name, one in record.RUNS.items()}
    | RECORDED_ON_GPUS
    | {"ruined": "diverging", "answers": "answers"}
)
HEALTHY = [name for name, rule in EXPECTED.items() if rule is None]


def rules_of(folder: Path) -> list[str]:
    """The rules that fire for a recorded run."""
    return [one["rule"] for one in review([folder]).to_dict()["runs"][0]["findings"]]


def healthy() -> list[Run]:
    return [runs.read(record.FIXTURES / name) for name in HEALTHY]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_fixture_names_its_fault_and_no_other(name: str) -> None:
    rule = EXPECTED[name]
    assert rules_of(record.FIXTURES / name) == ([rule] if rule else [])


def test_every_fixture_is_known_and_small() -> None:
    assert {path.name for path in record.FIXTURES.iterdir()} == EXPECTED.keys()
    for name in EXPECTED:
        files = [file for file in (record.FIXTURES / name).rglob("*") if file.is_file()]
        assert sum(file.stat().st_size for file in files) < record.MOST_BYTES, name


@pytest.mark.parametrize(
    ("name", "rank", "cause"), [("slow-rank-compute", 1, "computation"), ("slow-rank-loader", 0, "loader")]
)
def test_a_slow_rank_is_named_with_its_cause(name: str, rank: int, cause: str) -> None:
    one = review([record.FIXTURES / name]).to_dict()["runs"][0]
    assert f"Speed: rank {rank} " in one["verdict"]
    assert f"Cause: its {cause}" in one["findings"][0]["evidence"]


def test_the_first_leaked_row_is_named() -> None:
    finding = review([record.FIXTURES / "leak"]).to_dict()["runs"][0]["findings"][0]
    assert "5 of 21 evaluation rows" in finding["evidence"] and "eval.jsonl, line 17" in finding["evidence"]


def test_throttling_is_named_in_a_recorded_run(tmp_path: Path) -> None:
    """A recorded healthy run, to whose second rank a GPU is given that NVML reports as too hot."""
    out = record.FIXTURES / "healthy-lora"
    lines = [json.loads(line) for line in (out / "runs" / "ranks.jsonl").read_text().splitlines()]
    for line in lines:
        for one in line["ranks"]:
            hot = one["rank"] == 1
            one["gpu"] = {"utilization": 0.99, "sm_clock_mhz": 1200.0 if hot else 1980.0, "samples": 4}
            one["gpu"] |= {"throttled": 0.75 if hot else 0.0, "reasons": ["thermal"] if hot else []}
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "ranks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "run.json").write_text((out / "run.json").read_text())
    assert rules_of(tmp_path) == ["throttling"]


# --- thresholds -------------------------------------------------------------------------------------------------------


def risen(run: Run) -> float | None:
    """How far the last held-out loss is above the first, or the last two above their least before."""
    values = run.series("eval_loss").values
    if len(values) < 2:
        return None
    lasting = values[-2:].min() / values[:-2].min() - 1 if len(values) > 2 else 0.0
    return max(values[-1] / values[0] - 1, lasting, 0.0)


# Rule -> what it compares for a run, and its threshold for that run: larger means worse.
CALIBRATED = {
    "data-wait": (timing.data_wait, lambda run: speed.DATA_WAIT),
    "straggler": (
        lambda run: None if straggler.value(run) is None else straggler.value(run) - 1,
        lambda run: straggler.threshold(run, 100) - 1,
    ),
    "communication": (timing.least_communication, lambda run: ranks.ALONE),
    "evaluation-share": (timing.evaluation_share, lambda run: speed.EVALUATION),
    "diverging": (
        lambda run: None if learning.rise(run) is None else learning.rise(run).last / learning.rise(run).least - 1,
        lambda run: learning.RISE - 1,
    ),
    "overfitting": (risen, lambda run: learning.HELD_OUT - 1),
    "updates-lost": (learning.unchanged, lambda run: learning.UNCHANGED),
    "collapsed-routing": (routing.unused, lambda run: routing.UNUSED),
}


@pytest.mark.parametrize("rule", CALIBRATED)
def test_a_calibrated_threshold_is_three_times_the_largest_healthy_value(rule: str) -> None:
    value, threshold = CALIBRATED[rule]
    known = [(found, threshold(run)) for run in healthy() if (found := value(run)) is not None]
    assert rule in RULES and all(3 * found <= limit for found, limit in known), known


def test_a_healthy_run_moves_the_held_out_loss() -> None:
    moves = [abs(values[-1] / values[0] - 1) for run in healthy() if len(values := run.series("eval_loss").values)]
    assert moves and min(moves) >= 3 * learning.MOVED


def test_host_lead_and_memory_of_healthy_gpus_are_far_from_the_thresholds() -> None:
    """Here less is worse for the lead; memory is a share of what there is."""
    for run in healthy():
        lead, full = speed.host_lead(run), memory.fullest(run)
        assert not run.on_gpus or lead is None or lead >= 3 * speed.HOST_LEAD
        assert full is None or full < memory.FULL


def test_tokens_of_a_healthy_mixture_of_experts_are_far_from_being_on_one() -> None:
    known = [found for run in healthy() if (found := routing.share_on_one(run)) is not None]
    assert known and all(2 * found <= routing.ON_ONE for found in known)
    collapsed = runs.read(record.FIXTURES / "collapsed-routing")
    assert (routing.share_on_one(collapsed) or 0) > routing.ON_ONE
    assert (routing.unused(collapsed) or 0) > routing.UNUSED


# --- recorded anew ----------------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.campaign
@pytest.mark.parametrize("name", ["healthy-lora", "slow-rank-compute", "leak"])
def test_a_run_recorded_now_gives_the_same(name: str, tmp_path: Path) -> None:
    """Up to three times: on a busy machine a rank may really be slow, or communication take long."""
    rule = record.RUNS[name].rule
    found = []
    for number in range(3):
        out = tmp_path / str(number) / name
        record.record(name, out, **{"training.max_steps": "30", "training.eval_steps": "15"})
        found.append(rules_of(out))
        if found[-1] == ([rule] if rule else []):
            return
    raise AssertionError(f"expected {rule}: {found}")
