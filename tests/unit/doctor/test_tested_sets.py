"""Tests of finetune/doctor/tested_sets.py."""

from __future__ import annotations

import re
import tomllib
from itertools import chain
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from finetune.config import Config
from finetune.doctor import checks, tested_sets
from finetune.runtime import bootstrap
from tests.helpers import ROOT
from tests.helpers.doctor import gpus


@pytest.mark.parametrize(
    ("file", "without"),
    [
        ("constraints.txt", set()),
        ("constraints-gpu.txt", set()),
        ("constraints-oldest.txt", {"unsloth", "unsloth_zoo"}),
    ],
)
def test_a_tested_set_of_constraints_has_their_versions(file: str, without: set[str]) -> None:
    (pinned,) = [one["versions"] for one in tested_sets.read().values() if one.get("from") == file]
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    assert set(pinned) == set(bootstrap.LIBRARIES) - without
    assert {f"{name}=={number}" for name, number in pinned.items()} <= set(lines)


def test_every_tested_set_is_in_the_allowed_ranges() -> None:
    """And has a device, and says where it comes from."""
    ranges = [Requirement(text) for text in checks.requirements() or []]
    for name, one in tested_sets.read().items():
        assert one["device"] in ("cpu", "cuda") and ("from" in one) != ("date" in one), name
        for requirement in ranges:
            number = one["versions"].get(requirement.name.replace("-", "_"))
            assert number is None or requirement.specifier.contains(number), f"{name}: {requirement}, not {number}"


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


def test_every_lower_bound_is_the_oldest_release_that_is_tested() -> None:
    """Of all that a CPU can use; of the extras for GPUs, what the newest releases are."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = content["project"]["optional-dependencies"]
    for_gpus = [text for name in ("unsloth", "flash", "liger") for text in extras.pop(name)]
    for_all = [*content["build-system"]["requires"], *content["project"]["dependencies"], *chain(*extras.values())]

    def pinned(file: str) -> set[tuple[str, Version]]:
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        pairs = (line.split("==") for line in lines if not line.startswith("#"))
        return {(canonicalize_name(name), Version(version)) for name, version in pairs}

    def bounds(texts: list[str]) -> set[tuple[str, Version]]:
        found = [(one.name, each) for one in map(Requirement, texts) for each in one.specifier if each.operator == ">="]
        assert len(found) == len(texts), "one lower bound each"
        return {(canonicalize_name(name), Version(bound.version)) for name, bound in found}

    oldest = pinned("constraints-oldest.txt")
    assert bounds(for_all) == oldest
    assert bounds(for_gpus) <= oldest | pinned("constraints-gpu.txt")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (installed,) = re.findall(r"install .*-c constraints-oldest\.txt -e '\.\[(.*)\]'", makefile)
    once_more = {"plots", "convert"}  # what dev has anyway
    assert set(installed.split(",")) == set(extras) - once_more
    assert all(set(extras[name]) <= set(extras["dev"]) for name in once_more)


@pytest.mark.parametrize(
    ("devices", "name"),
    [([], "make test"), ([], "make test-newest"), (gpus(1), "GPU install"), (gpus(1), "GPU records")],
)
def test_other_versions_than_a_tested_set_are_a_warning(devices: list[dict[str, Any]], name: str) -> None:
    pins = tested_sets.read()[name]["versions"]

    def found_with(**other: str | None) -> tuple[str, str]:
        found = {"devices": devices, "versions": dict.fromkeys(bootstrap.LIBRARIES) | pins | other}
        verdict = checks.CHECKS["tested versions"](Config(), found)
        assert verdict is not None
        return verdict

    state, reason = found_with(torch=pins["torch"] + "+cu130", unsloth=pins.get("unsloth"))
    assert state == "ok" and reason.startswith(f"those of {name} ("), reason
    state, reason = found_with(trl="1.99.0")
    assert state == "warning" and f"nearest, {name} (" in reason
    assert f"trl 1.99.0 (tested: {pins['trl']})" in reason and "torch" not in reason.partition("differs")[2]


def test_what_a_set_was_tested_without_is_a_difference() -> None:
    newest = tested_sets.read()["make test-newest"]["versions"]
    assert tested_sets.differences(newest, newest | {"unsloth": "2026.10.9"}) == [
        "unsloth 2026.10.9 (tested: without it)"
    ]
    assert tested_sets.differences(newest, newest | {"bitsandbytes": None}) == []
