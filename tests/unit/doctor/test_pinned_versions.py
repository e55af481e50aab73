"""Tests of finetune/doctor/pinned_versions.py."""

from __future__ import annotations

import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from finetune.doctor import pinned_versions
from finetune.runtime import bootstrap
from tests.helpers import ROOT


@pytest.mark.parametrize(
    ("file", "pins"), [("constraints.txt", pinned_versions.CPU), ("constraints-gpu.txt", pinned_versions.GPU)]
)
def test_pinned_versions_are_those_of_the_constraints(file: str, pins: dict[str, str]) -> None:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    assert set(pins) == set(bootstrap.LIBRARIES)
    assert {f"{name}=={number}" for name, number in pins.items()} <= set(lines)


@pytest.mark.parametrize(
    ("file", "extras"),
    [("constraints.txt", ("dev", "unsloth")), ("constraints-gpu.txt", ("unsloth", "flash", "liger"))],
)
def test_constraints_pin_what_is_installed_within_its_range(file: str, extras: tuple[str, ...]) -> None:
    """All direct dependencies on a CPU; on a GPU, those of the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for line in (ROOT / file).read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
        for pin in [Requirement(line)]
    }
    direct = [Requirement(text) for text in project["dependencies"]]
    chosen = [Requirement(text) for extra in extras for text in project["optional-dependencies"][extra]]
    needed = {canonicalize_name(one.name) for one in (direct + chosen if "dev" in extras else chosen)}
    assert needed <= set(pins)
    for one in direct + chosen:
        name = canonicalize_name(one.name)
        assert name not in pins or one.specifier.contains(pins[name]), f"{one}, pinned: {pins[name]}"
