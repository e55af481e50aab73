"""The table of metrics obeys what TensorBoard can show, and every chart refers to it."""

from __future__ import annotations

import re

import pytest

from finetune.engine.monitoring import tensorboard_pages
from finetune.runtime.tags import BY_NAME, METRICS, tag


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_tag_can_be_shown(metric) -> None:
    group, _, title = metric.of(63).partition("/")
    assert re.fullmatch(r"[1-9] [a-z]+", group), "TensorBoard sorts groups by name"
    assert len(title) <= 32, "a card cuts longer titles"
    assert not set("()") & set(metric.tag), "custom scalars would show an empty chart"
    assert metric.unit in ("", "nats", "0-1", "x even", "1/s", "s", "h", "GiB", "MHz", "W", "C", "tokens", "1")
    assert not metric.unit or metric.tag.endswith(f"[{metric.unit}]")
    assert metric.meaning.endswith(".")


def test_names_and_tags_are_unique() -> None:
    tags = [one for metric in METRICS for one in (metric.tag, *metric.also)]
    assert len(BY_NAME) == len(METRICS) and len(set(tags)) == len(tags)


def test_a_tag_of_a_rank() -> None:
    assert tag("own_work_of_rank", 3) == "5 ranks/own work of rank 3 [s]"
    with pytest.raises(KeyError):
        tag("loses")


def test_every_chart_finds_its_tags_and_no_other() -> None:
    """In a multiline chart a tag is a regular expression, matched from the start; in a margin chart it is plain."""
    every = {one for metric in METRICS for one in ((metric.of(0), metric.of(12)) if metric.per_rank else (metric.tag,))}
    shown: list[str] = []
    for charts in tensorboard_pages.layout().values():
        for kind, wanted in charts.values():
            if kind == "Margin":
                assert len(wanted) == 3 and set(wanted) <= every
                continue
            for pattern in wanted:
                found = [one for one in every if re.match(pattern, one)]
                metrics = {re.sub(r"\d+(?= \[)", "N", one) for one in found}
                assert len(metrics) == 1, (pattern, found)
                shown += found
    assert len(shown) == len(set(shown)), "a curve in two charts"
    assert list(tensorboard_pages.layout())[0].endswith("Is it learning?")
