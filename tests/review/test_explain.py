"""What the rules mean: `--explain`, and examples that are what the recorded runs give."""

from __future__ import annotations

import re

import pytest

from finetune.review import command
from finetune.review.assemble import review
from finetune.review.finding import percent
from finetune.review.rules import RULES, data, explanations, learning, memory, ranks, routing, speed, straggler
from tests.helpers import ROOT

EXPLANATIONS = explanations()
# Of those whose example is a recorded run: what the run gave, and the folder of the run.
RECORDED = {
    name: (found.group(1), found.group(2))
    for name, one in EXPLANATIONS.items()
    if (found := re.fullmatch(r"(.+) \([^()]*(tests/review/fixtures/[\w-]+)[^()]*\)\.", one.parts["Example"]))
    and "No recorded run" not in found.group(1)
}
PARTS = ["What you see", "What it means", "How it is measured", "Example", "What to do", "What that brings"]


def test_every_rule_is_explained() -> None:
    assert EXPLANATIONS.keys() == RULES.keys()
    assert all(one.question.endswith("?") and list(one.parts) == PARTS for one in EXPLANATIONS.values())


@pytest.mark.parametrize(
    ("rule", "thresholds"),
    [
        ("data-wait", (percent(speed.DATA_WAIT),)),
        ("straggler", (f"{straggler.THRESHOLD:.2f}", f"{straggler.THRESHOLD_CPU:.2f}", percent(straggler.LOST))),
        ("communication", tuple(map(percent, (ranks.COMMUNICATION, ranks.ALONE, ranks.CHEAPER)))),
        ("padding", (percent(speed.PADDING),)),
        ("host-bound", (percent(speed.HOST_LEAD), percent(speed.UTILIZATION))),
        ("small-batch", (percent(speed.ROOM), percent(speed.BEST))),
        ("evaluation-share", (percent(speed.EVALUATION), f"{speed.REPEATED} pauses", f"{speed.LEAST_SECONDS:.0f} s")),
        ("throttling", (percent(ranks.THROTTLED), percent(ranks.CLOCK))),
        ("efficiency", (percent(ranks.EFFICIENCY),)),
        ("memory-near-limit", (percent(memory.FULL),)),
        (
            "diverging",
            (str(learning.RISE), str(learning.HELD_OUT), str(learning.CLIPPED_RISE), percent(learning.CLIPPED)),
        ),
        ("spikes", (f"{learning.SPIKE_Z:.0f}", percent(learning.SPIKE_HEIGHT), f"{learning.SPIKES} on")),
        ("collapsed-routing", (percent(routing.UNUSED), percent(routing.ON_ONE), f"{routing.FEWEST_TOKENS:.0f}")),
        ("frozen", (f"{learning.FROZEN_NORM:g}", f"{learning.FROZEN_STEPS} steps", percent(learning.MOVED))),
        ("updates-lost", tuple(map(percent, (learning.UNCHANGED, learning.UNCHANGED_RATE)))),
        ("overfitting", (str(learning.HELD_OUT), f"{learning.HELD_OUT_LAST} evaluations")),
        ("answers", (percent(learning.ANSWERS), f"{learning.ANSWERS_FEWEST} answers", f"{learning.ANSWERS_STEPS} st")),
        ("rows-lost", (percent(data.DROPPED), percent(data.TRUNCATED))),
    ],
)
def test_an_explanation_names_the_thresholds_of_its_rule(rule: str, thresholds: tuple[str, ...]) -> None:
    measured = EXPLANATIONS[rule].parts["How it is measured"]
    assert [one for one in thresholds if one not in measured] == []


@pytest.mark.parametrize("rule", RECORDED)
def test_an_example_is_what_the_recorded_run_gives(rule: str) -> None:
    example, folder = RECORDED[rule]
    findings = review([ROOT / folder]).to_dict()["runs"][0]["findings"]
    evidence = next(one["evidence"] for one in findings if one["rule"] == rule)
    assert evidence.removesuffix(".").lower() == example.lower()


def test_records_that_examples_name_are_there() -> None:
    examples = [one.parts["Example"] for one in EXPLANATIONS.values()]
    files = [path for text in examples for path in re.findall(r"(?:benchmarks|tests)/[\w./-]*\w", text)]
    assert len(files) > 15 and [path for path in files if not (ROOT / path).exists()] == []


def test_explanations_send_nobody_to_a_file_of_the_checkout() -> None:
    """Who installed a wheel has no docs/: the Review tab, the report and `--explain` have the whole text."""
    tab = (ROOT / "finetune" / "review" / "board" / "tab.js").read_text(encoding="utf-8")
    shown = [text for one in EXPLANATIONS.values() for text in (one.question, *one.parts.values())]
    assert [text for text in [tab, *shown] if "docs/" in text] == []


def test_explain_prints_one_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--explain", "host-bound"]) == 0
    shown = capsys.readouterr().out
    assert "GPU does nothing by itself" in " ".join(shown.split()) and "What to do" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert command.main(["--explain", "hostbound"]) == 2
    message = capsys.readouterr().err
    assert "unknown rule: hostbound" in message and "host-bound" in message
