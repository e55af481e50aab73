"""ARCHITECTURE.md names modules, classes and functions that exist."""

from __future__ import annotations

import ast
import re

import pytest

from tests.helpers import ROOT

PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"`([a-z_]+(?:\.[A-Za-z_]+)+)`", PAGE)))


def is_defined(name: str) -> bool:
    """Whether `a.b.C.d` is a folder or file of the package, or is defined in the file that a part of it names."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        place = (ROOT / "finetune").joinpath(*parts[:end])
        if place.with_suffix(".py").is_file():
            tree: ast.AST = ast.parse(place.with_suffix(".py").read_text(encoding="utf-8"))
            break
        if place.is_dir():
            return end == len(parts)
    else:
        return False
    for part in parts[end:]:
        found = [
            node
            for node in ast.iter_child_nodes(tree)
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part
        ]
        if not found:
            return False
        tree = found[0]
    return True


def test_the_page_has_names_and_the_check_can_fail() -> None:
    assert len(NAMES) > 30
    assert is_defined("data.plan.Plan") and not is_defined("data.plan.Plans") and not is_defined("data.no.Plan")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_exists(name: str) -> None:
    assert is_defined(name)


def test_each_floor_of_the_table_is_a_floor() -> None:
    floors = re.findall(r"\*\*(\w+)\*\*", PAGE.partition("| floor |")[2].partition("\n\n")[0])
    assert floors == ["advise", "train", "drop_in", "measure", "engine", "data", "runtime", "config", "patches"]
    places = [ROOT / "finetune" / name for name in floors[:-1]] + [ROOT / "patches"]
    assert all(place.exists() or place.with_suffix(".py").exists() for place in places)
