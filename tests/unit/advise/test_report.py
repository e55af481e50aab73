"""Tests of finetune/advise/report.py."""

from __future__ import annotations

import pytest

from finetune.advise import report
from tests.helpers.advise import FAST, table


def test_costs_also_at_a_price_of_zero() -> None:
    found = table(FAST, price=0.0)
    assert [row.cost for row in found] == [0.0, 0.0, 0.0]
    assert found[1].price_of_an_hour_saved == 0.0 and "costs 0.00" in report.describe(found[1])
    assert table(FAST)[1].cost == pytest.approx(2 * 2.0 * found[1].prediction.hours)
    assert table(FAST, price=None)[1].cost is None and len(report.cells(table(FAST, price=None)[0], False)) == 6
