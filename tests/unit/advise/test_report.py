"""Tests of finetune/advise/report.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from finetune.advise import report
from finetune.measure import dry_run_report
from tests.helpers.advise import FAST, measurement, table


def test_costs_also_at_a_price_of_zero() -> None:
    found = table(FAST, price=0.0)
    assert [row.cost for row in found] == [0.0, 0.0, 0.0]
    assert table(FAST)[1].cost == pytest.approx(2 * 2.0 * found[1].prediction.hours)
    assert table(FAST, price=None)[1].cost is None and len(report.cells(table(FAST, price=None)[0], False)) == 6


def test_active_parameters_of_a_mixture_of_experts() -> None:
    dense = measurement()
    assert report.active_parameters(dense) == []
    routed = replace(dense, parameters=30_532_122_624, active_parameters=3_353_032_704)
    (text,) = report.active_parameters(routed)
    assert "30.5 B parameters, 3.35 B active per token" in text
    text = dry_run_report.model_text(routed.to_dict())
    assert text == "30.5 B parameters, 3.35 B active per token, 10 M trained"
    full = replace(dense, trainable_parameters=dense.parameters)
    assert dry_run_report.model_text(full.to_dict()) == "1 B parameters, all trained"
