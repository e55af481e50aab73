"""Tests of docs/site/generate.py: the pages in docs/ and the table in the README are what it writes."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from finetune.config.help import COMMON, default_of
from finetune.config.schema import KEYS
from finetune.doctor import tested_sets
from finetune.errors import UserError
from finetune.review.rules import RULES
from finetune.runtime import bootstrap
from tests.helpers import ROOT


@pytest.fixture
def generate() -> Any:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "site" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["configuration", "notebook-rules", "review-rules"])
def test_a_page_is_what_is_written(generate: Any, name: str) -> None:
    assert (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") == generate.PAGES[name](), "run `make docs`"


def test_every_key_is_in_its_section_and_every_rule_in_a_group() -> None:
    first, *sections = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8").split("\n## ")[1:]
    assert first.startswith("Common settings") and all(f"| `{name}` |" in first for name in COMMON)
    for name, field in KEYS.items():
        section, key = name.split(".")
        table = next(text for text in sections if text.startswith(f"{section}\n"))
        row = next(line for line in table.splitlines() if line.startswith(f"| `{key}` |"))
        assert field.metadata["help"].replace("|", "\\|") in row and f"| `{default_of(name)}` |" in row
    contents = (ROOT / "docs" / "review-rules.md").read_text(encoding="utf-8").split("\n## ")[0]
    assert sorted(re.findall(r"\[([a-z-]+)\]\(#\1\)", contents)) == sorted(RULES)


def test_the_readme_has_the_tested_sets_and_the_number_of_rules_of_today(generate: Any) -> None:
    page, sets = (ROOT / "README.md").read_text(encoding="utf-8"), tested_sets.read()
    assert generate.updated(page, sets) == page, "run `make docs`"
    assert f"`review` applies {len(RULES)} rules" in page
    newest = sets["make test-newest"]
    (row,) = [line for line in page.splitlines() if line.startswith("| make test-newest |")]
    assert newest["date"] in row and newest["versions"]["transformers"] in row and newest["versions"]["trl"] in row


def test_a_lane_that_passed_is_recorded_with_its_date(
    generate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `make test-newest` does at its end, on a copy of the checkout's files."""
    for file in (*ROOT.glob("constraints*.txt"), ROOT / "README.md"):
        (tmp_path / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "FILE", tmp_path / "sets.json")
    installed = {name: "9.9.9+cpu" for name in bootstrap.LIBRARIES} | {"unsloth": None}
    monkeypatch.setattr(bootstrap, "versions", lambda: installed)
    assert generate.main(["make test-newest"]) == 0
    written = json.loads((tmp_path / "sets.json").read_text())
    newest = written["make test-newest"]
    assert newest["versions"] == {name: "9.9.9" for name in bootstrap.LIBRARIES if name != "unsloth"}
    assert newest["date"] >= "2026-11-25" and f"| make test-newest | {newest['date']} | 9.9.9 |" in (
        (tmp_path / "README.md").read_text(encoding="utf-8")
    )
    assert written["make test"] == tested_sets.read()["make test"]
    with pytest.raises(UserError, match="unknown set of versions: `make tea`. Give one of `make test-newest`"):
        generate.main(["make tea"])


def test_a_lane_records_a_set_that_has_a_date() -> None:
    """Otherwise its last command fails, after all tests passed."""
    recorded = re.findall(r'docs/site/generate\.py "(.+)"', (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert recorded and all("date" in tested_sets.read().get(name, {}) for name in recorded)
