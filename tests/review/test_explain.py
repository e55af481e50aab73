"""What the rules mean: `--explain`, and examples that are what the recorded runs give."""

from __future__ import annotations

import re

import pytest

from finetune.review import command, review
from finetune.review.rules import EXPLANATIONS, RULES
from tests.helpers import ROOT

RECORDED = {
    name: found.group()
    for name, one in EXPLANATIONS.items()
    if (found := re.search(r"tests/review/fixtures/[\w-]+", one.source)) and "No recorded run" not in one.example
}


def test_every_rule_is_explained() -> None:
    assert list(EXPLANATIONS) == list(RULES)
    assert all(text.strip() for one in EXPLANATIONS.values() for text in (one.question, *one.parts().values()))


@pytest.mark.parametrize("rule", RECORDED)
def test_an_example_is_what_the_recorded_run_gives(rule: str) -> None:
    findings = review([ROOT / RECORDED[rule]]).to_dict()["runs"][0]["findings"]
    evidence = next(one["evidence"] for one in findings if one["rule"] == rule)
    assert evidence.lower() == EXPLANATIONS[rule].example.lower()


def test_records_that_examples_name_are_there() -> None:
    files = [path for one in EXPLANATIONS.values() for path in re.findall(r"(?:benchmarks|tests)/[\w./-]+", one.source)]
    assert len(files) > 15 and [path for path in files if not (ROOT / path).exists()] == []


def test_explanations_send_nobody_to_a_file_of_the_checkout() -> None:
    """Who installed a wheel has no docs/: the Review tab, the report and `--explain` have the whole text."""
    tab = (ROOT / "finetune" / "review" / "board" / "tab.js").read_text(encoding="utf-8")
    shown = [text for one in EXPLANATIONS.values() for text in (one.question, *one.parts().values())]
    assert [text for text in [tab, *shown] if "docs/" in text] == []


def test_explain_prints_one_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--explain", "host-bound"]) == 0
    shown = capsys.readouterr().out
    assert "GPU does nothing by itself" in " ".join(shown.split()) and "What to do" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert command.main(["--explain", "hostbound"]) == 2
    message = capsys.readouterr().err
    assert "unknown rule: hostbound" in message and "host-bound" in message
