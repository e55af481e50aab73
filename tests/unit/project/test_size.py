"""The budget: most lines and files of each part of the code, and the number of configuration keys.

    python tests/unit/project/test_size.py

prints the table for today's figures, with 2 % of room for each part. Lines are those of `wc -l`, of Python files and
tab.js.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# part: (most lines, most files). The files directly in finetune/ are the part `finetune/*`.
MOST = {
    "benchmarks": (7000, 34),
    "finetune/*": (1203, 12),
    "finetune/advise": (805, 8),
    "finetune/bench": (518, 7),
    "finetune/chat": (1069, 8),
    "finetune/config": (2860, 10),
    "finetune/convert": (6258, 31),
    "finetune/data": (5432, 23),
    "finetune/doctor": (883, 9),
    "finetune/drop_in": (2606, 13),
    "finetune/engine": (15995, 103),
    "finetune/export": (2942, 13),
    "finetune/init": (522, 5),
    "finetune/measure": (3841, 19),
    "finetune/parity": (472, 4),
    "finetune/review": (4409, 28),
    "finetune/run": (479, 4),
    "finetune/runtime": (5859, 35),
    "patches": (1241, 18),
    "tests": (50799, 400),
}
TOTAL = (56065, 331)  # of the parts of finetune/ together
KEYS = 99  # of the configuration

OVER = (
    "{part} has {found}, and the budget is {most}. Delete as much as you add, or raise the number in a commit of its "
    "own that says what users get for it (CONTRIBUTING.md)."
)


def parts() -> Iterator[tuple[str, Path]]:
    """Every file that counts, with the name of its part. Inputs of tests and records of runs are no code."""
    for path in sorted((ROOT / "finetune").rglob("*")):
        if path.suffix in (".py", ".js") and path.is_file():
            inner = path.relative_to(ROOT / "finetune").parts
            yield f"finetune/{inner[0] if len(inner) > 1 else '*'}", path
    for name in ("patches", "benchmarks", "tests"):
        for path in sorted((ROOT / name).rglob("*.py")):
            if path.is_file() and not path.is_relative_to(ROOT / "tests" / "notebooks" / "probes"):
                yield name, path


def count() -> dict[str, tuple[int, int]]:
    """Lines and files of each part."""
    lines, files = Counter[str](), Counter[str]()
    for part, path in parts():
        lines[part] += path.read_bytes().count(b"\n")
        files[part] += 1
    return {part: (lines[part], files[part]) for part in lines}


def total(found: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """Lines and files of the package."""
    mine = [size for part, size in found.items() if part.startswith("finetune/")]
    return sum(lines for lines, _ in mine), sum(files for _, files in mine)


FOUND = count()


@pytest.mark.parametrize("part", sorted(FOUND.keys() | MOST.keys()))
def test_a_part_is_within_its_budget(part: str) -> None:
    assert part in MOST, f"{part} is new: give it a row of MOST, and say in the commit what users get for it."
    assert part in FOUND, f"{part} is gone: remove its row of MOST."
    for kind, found, most in zip(("lines", "files"), FOUND[part], MOST[part], strict=True):
        assert found <= most, OVER.format(part=part, found=f"{found} {kind}", most=most)


def test_the_package_is_within_its_budget() -> None:
    for kind, found, most in zip(("lines", "files"), total(FOUND), TOTAL, strict=True):
        assert found <= most, OVER.format(part="The package", found=f"{found} {kind}", most=most)


def test_no_key_of_the_configuration_is_added() -> None:
    from finetune.config import schema

    found = len(schema.KEYS)
    assert found <= KEYS, OVER.format(part="The configuration", found=f"{found} keys", most=KEYS)


def test_the_totals_count_what_they_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("finetune/a.py", "finetune/b/c.py", "finetune/b/d/e.js", "tests/f.py", "tests/notebooks/probes/g.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n\ny = 2\n")
    monkeypatch.setattr("tests.unit.project.test_size.ROOT", tmp_path)
    assert count() == {"finetune/*": (3, 1), "finetune/b": (6, 2), "tests": (3, 1)}
    assert total(count()) == (9, 3)


if __name__ == "__main__":

    def row(lines: int, files: int) -> str:
        """With 2 % of room."""
        return f"({math.ceil(lines * 1.02)}, {math.ceil(files * 1.02)})"

    for name, size in sorted(FOUND.items()):
        print(f'    "{name}": {row(*size)},  # today {size[0]}, {size[1]}')  # noqa: T201
    print(f"TOTAL = {total(FOUND)}")  # noqa: T201
