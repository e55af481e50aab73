"""Tests of benchmarks/study/advise.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.study import advise as dense
from finetune.advise import verdict
from finetune.measure.predict import Work
from tests.helpers.advise import SLOW, card, host


def test_dense_models_are_reckoned_from_their_own_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    job = dense.chosen("258K", 64)
    assert sum(job.gradients.sizes) == 4 * job.model.parameters

    def measure(models: Any, world: int, environment: Any, options: Any, machine: Any, *, ddp: bool) -> dict:
        assert world == 1 and models[0].batches == ((32,) if ddp else (64,))
        seconds = {"forward": 1.0, "backward": 2.0, "optimizer": 0.5, "other": 0.5}
        parts = {name: {"median": value} for name, value in seconds.items()}
        ranks = [{"seconds": parts, "memory_gib": 0.5}]  # with buckets in DDP
        return {("258K", batch): {"step_seconds": {"median": batch / 32}, "ranks": ranks} for batch in (64, 32)}

    monkeypatch.setattr(dense.study, "measure", measure)
    found = dense.candidates(job, [1, 2, 3], host(card(0), card(1)))
    assert isinstance(found[3], str) and "does not divide exactly over 3 devices" in found[3]
    one, two = found[1], found[2]
    assert isinstance(one, Work) and isinstance(two, Work)
    # The step as a whole counts; the parts, which were measured in another run, share it out.
    assert one.compute_seconds == pytest.approx(2 * 3 / 4) and two.compute_seconds == pytest.approx(3 / 4)
    assert one.backward_share == pytest.approx(2 / 3)
    assert replace(one, compute_seconds=0).optimizer_seconds == pytest.approx(0.25)
    rows = verdict.rows(found, {2: (SLOW, "slow")}, here=2)
    assert rows[0].prediction and rows[0].prediction.step_seconds == pytest.approx(2.0)
    assert [row.prediction.peak_memory_bytes for row in rows[:2] if row.prediction] == [2**29, 2**29]
    short = [replace(rows[0], prediction=replace(rows[0].prediction, step_seconds=0.002)), *rows[1:]]
    assert dense.short_step(rows, host(card(0))) == [] and dense.short_step(short, host()) == []
    (note,) = dense.short_step(short, host(card(0)))
    assert note.startswith("A step of 2.0 ms is the host launching kernels")


def test_unknown_models_of_the_study(capsys: pytest.CaptureFixture[str]) -> None:
    assert dense.main(["1B"]) == 2
    assert "unknown model: 1B. The study has 258K, 6.9M." in capsys.readouterr().err
