"""Every probe notebook has its expected outcome, but for those in probes/TODO.txt."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.probe import FOLDER, SECRETS, Probe, judge, probes, read_probe, todo

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


FALSE = {
    "missing code": [("has", "load_from_disk")],
    "code that is there": [("hasnot", "load_dataset")],
    "a missing note": [("says", "no such note")],
    "lost code": [("kept or named", "merge_and_unload")],
}


@pytest.mark.process
@pytest.mark.parametrize("facts", FALSE.values(), ids=FALSE.keys())
def test_a_false_fact_is_found(facts: list[tuple[str, str]], tmp_path: Path) -> None:
    probe = read_probe(FOLDER / "unknown_columns" / "hub_no_text_field.py")
    probe.facts = facts
    assert judge(probe, tmp_path).kind == "wrong"


@pytest.mark.process
@pytest.mark.parametrize(("expect", "kind"), [("refused", "wrong"), ("refused R4", "wrong"), ("converted", "right")])
def test_an_unexpected_conversion_is_wrong(expect: str, kind: str, tmp_path: Path) -> None:
    probe = read_probe(FOLDER / "unknown_columns" / "hub_no_text_field.py")
    probe.expect = expect
    assert judge(probe, tmp_path).kind == kind


@pytest.mark.process
@pytest.mark.parametrize(("expect", "kind"), [("refused R2", "refused as expected"), ("refused R4", "refused wrongly")])
def test_a_refusal_needs_the_right_code(expect: str, kind: str, tmp_path: Path) -> None:
    probe = read_probe(FOLDER / "limits" / "two_trainings.py")
    probe.expect = expect
    assert judge(probe, tmp_path).kind == kind


@pytest.mark.process
def test_a_copied_secret_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = read_probe(FOLDER / "secrets" / "login_literal.py")
    assert judge(probe, tmp_path).good
    monkeypatch.setattr("finetune.convert.notebook.secrets.remove_secrets", lambda notebook: [])
    monkeypatch.setattr("finetune.convert.script.write.scrub", lambda text: text)
    monkeypatch.setattr("finetune.convert.script.report.scrub", lambda text: text)
    verdict = judge(probe, tmp_path)
    assert verdict.kind == "wrong" and "@HF@" in verdict.details and SECRETS["@HF@"] not in verdict.details


def test_an_unknown_fact_is_an_error(tmp_path: Path) -> None:
    path = FOLDER / "limits" / "tpu.py"
    copy = tmp_path / "a" / "b.py"
    copy.parent.mkdir()
    copy.write_text("# expext: converted\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(ValueError, match="unknown fact"):
        read_probe(copy)
