"""The table of recorded results: what it and the documents name exists, and every record is named."""

from __future__ import annotations

import re

from tests.helpers import ROOT

RESULTS = ROOT / "benchmarks" / "results"
TABLE = (RESULTS / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def rows() -> list[str]:
    return [line for line in TABLE.splitlines() if line.startswith("| ")][1:]


def test_a_row_is_one_claim_with_its_record() -> None:
    assert 30 < len(rows()) <= 60
    for row in rows():
        assert len(row) < 300 and row.count(" | ") == 3 and "](" in row.split(" | ")[3], row


def test_every_record_is_in_the_table_and_every_link_has_its_file() -> None:
    linked = set(re.findall(r"\]\(([^)]+)\)", TABLE))
    assert not [link for link in linked if not (RESULTS / link).exists()]
    assert not [path.name for path in RESULTS.glob("*.json*") if path.name not in linked]


def test_records_and_scripts_that_documents_name_are_there() -> None:
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for name in re.findall(r"benchmarks/results/(20[\w.-]+\.\w+)", text):
            assert (RESULTS / name).is_file(), f"{document.name}: {name}"
        for name in re.findall(r"python -m (benchmarks[\w.]*)", text):
            assert module(name), f"{document.name}: {name}"


def test_scripts_of_the_table_are_there_or_marked_as_removed() -> None:
    for row in rows():
        for name, removed in re.findall(r"`([a-z_.0-9]+)[^`]*`(†?)", row.split(" | ")[2]):
            if name not in ("finetune", "finetune.train", "adapted.silu_and_multiply", "tests"):
                assert module(f"benchmarks.{name}") is not bool(removed), row


def test_every_script_is_named_or_imported() -> None:
    """`benchmarks/` holds what a reader runs, and what that needs."""
    tests = [path for path in (ROOT / "tests").rglob("test_*.py") if path.is_file()]
    files = [ROOT / "Makefile", *DOCUMENTS, *tests, *(ROOT / "benchmarks").rglob("*.py")]
    lines = [
        (path, line)
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        if "benchmarks" in line or line.startswith("|") or '.py"' in line
    ]
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        name = path.parent.name if path.stem == "__main__" else path.stem
        named = re.compile(rf"benchmarks\b.*\b{name}\b|^\|.*`{name}`|\"{name}\.py\"")
        assert path.stem == "__init__" or any(named.search(line) for other, line in lines if other != path), path


def module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
