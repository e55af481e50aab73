"""Every probe notebook has its expected outcome, but for those in probes/TODO.txt."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.probe import Probe, judge, probes, todo

PROBES, TODO = probes(), todo()


def parameters() -> list[object]:
    found = []
    for probe in PROBES:
        marks = [] if probe.fast else [pytest.mark.campaign]
        if probe.name in TODO:
            marks.append(pytest.mark.xfail(strict=True, reason=TODO[probe.name]))
        found.append(pytest.param(probe, id=probe.name, marks=marks))
    return found


@pytest.mark.process
@pytest.mark.parametrize("probe", parameters())
def test_the_outcome_is_the_expected_one(probe: Probe, tmp_path: Path) -> None:
    verdict = judge(probe, tmp_path)
    assert verdict.good, f"{probe.why}: {verdict.kind}: {verdict.details}"


def test_every_failure_in_the_list_is_a_probe() -> None:
    assert not TODO.keys() - {probe.name for probe in PROBES}


def test_the_fast_part_touches_every_cause() -> None:
    assert {probe.cause for probe in PROBES if probe.fast} == {probe.cause for probe in PROBES}
    assert sum(probe.fast for probe in PROBES) <= 40
