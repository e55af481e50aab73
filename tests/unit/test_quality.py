"""`benchmarks.quality`: what its parts compute, and a few steps of this package and of TRL on a pretrained model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.quality import __main__ as quality
from benchmarks.quality import cells, judge, models, orders, report, rows
from finetune.data.plan import Plan
from tests import tiny


def line(cell: str, seed: int, loss: float, **further: Any) -> dict[str, Any]:
    return {"cell": cell, "seed": seed, "loss": loss, "alone": True, "seconds": 10.0 * seed} | further


def test_the_answer_and_its_end_of_turn_are_supervised(tmp_path: Path) -> None:
    tokenizer = tiny.make_tokenizer(tmp_path)
    row = {"question": "How many?", "answer": "Seven.\n#### 7"}
    found = rows.encode(tokenizer, row, as_text=False)
    supervised = [one for one in found["labels"] if one != rows.IGNORED]
    assert tokenizer.decode(supervised) == "Seven.\n#### 7<|im_end|>"
    assert rows.prompt(tokenizer, row) + "Seven." in tokenizer.decode(found["input_ids"])
    text = rows.encode(tokenizer, row, as_text=True)
    assert tokenizer.decode(text["labels"]) == "How many?\nSeven.\n#### 7<|im_end|>"


@pytest.mark.parametrize(
    ("answer", "value"), [("a 3\n#### 1,200", "1200"), ("#### -4.5 apples", "-4.5"), ("It is 7.", "7"), ("none", None)]
)
def test_the_judge_reads_the_number_of_an_answer(answer: str, value: str | None) -> None:
    assert judge.number(answer) == value


def test_a_padded_step_has_the_tokens_of_a_packed_one() -> None:
    assert cells.rows_of_step(7473, 1_620_444, 50) == 150  # 398 packs of 4,096 are 50 steps of 8
    assert cells.rows_of_step(10, 2000, 50) == 10  # less than a step
    assert cells.divisor(150, 40) == 30


def test_sorted_packs_and_grouped_steps() -> None:
    lengths = np.random.default_rng(1).integers(1, 400, 2000)
    packs = orders.best_fit_decreasing(lengths, 1000, b"key of another version")
    assert sorted(packs.documents) == list(range(2000))
    assert packs.tokens.max() <= 1000
    assert (packs.tokens == [lengths[packs[row]].sum() for row in range(len(packs))]).all()
    assert packs.efficiency > 0.99
    longest = [lengths[packs[row]].max() for row in range(len(packs))]
    assert longest == sorted(longest, reverse=True)

    costs = packs.costs(64)
    plan = Plan(costs=costs, label_tokens=packs.tokens, global_batch_size=8, seed=1, fingerprint="x")
    spread = {}
    for group in (1, 8):
        order = orders.shuffled(plan, 0, group)
        assert sorted(order) == list(range(len(packs)))
        assert (order == orders.shuffled(plan, 0, group)).all()
        assert (order != orders.shuffled(plan, 1, group)).any()
        steps = costs[order[: len(order) // 8 * 8]].reshape(-1, 8)
        spread[group] = np.ptp(steps, axis=1).mean()
    assert spread[8] < spread[1] / 2


def test_the_table_compares_with_trl_of_the_same_mode(tmp_path: Path) -> None:
    file = tmp_path / "record.jsonl"
    lines = [
        line("trl lora padded", 1, 0.5), line("trl lora padded", 2, 0.7), line("lora packed", 1, 0.6),
        line("lora packed", 2, 0.6, alone=False, exact=0.25), line("lora padded", 1, 0.603),
        {"cell": "full packed", "seed": 1, "alone": True, "error": ["a", "out of memory"]},
        {"cell": "lora padded", "seed": 1, "alone": True, "error": ["later"]},
    ]  # fmt: skip
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
    table = report.table(report.read(file))
    found = {row.split(" | ")[0].lstrip("| "): row.split(" | ") for row in table.splitlines() if row.startswith("|")}
    assert found["lora packed"][1:9] == ["2", "0.6000", "0.0000", "+0.00 %", "25.0%", "", "10", "10"]
    assert found["lora padded"][4] == "+0.50 % (!)"
    assert found["lora padded"][8] == ""
    assert "full packed, seed 1: out of memory" in table


@pytest.mark.campaign
@pytest.mark.process
def test_a_few_steps_learn_as_with_trl(tmp_path: Path) -> None:
    try:
        models.build(tmp_path, "smollm2")
    except RuntimeError as error:
        pytest.skip(f"the pretrained model cannot be had: {error}")
    command = ["-m", "benchmarks.quality", "--smoke", "--models", str(tmp_path), "--work", str(tmp_path / "work")]
    done = subprocess.run([sys.executable, *command], cwd=quality.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {one["cell"]: one for one in report.read(tmp_path / "work" / "smoke.jsonl")}
    assert set(found) == set(cells.SMOKE)
    base, trl = found["base"]["loss"], found["trl lora padded"]["loss"]
    assert trl < base / 2
    for name in ("lora packed", "lora padded"):
        assert found[name]["loss"] == pytest.approx(trl, rel=0.003)
