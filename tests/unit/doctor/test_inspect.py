"""Tests of finetune/doctor/inspect.py."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import patches
from finetune.doctor import inspect
from finetune.runtime import bootstrap
from tests.helpers.doctor import examine
from tests.helpers.nvml import Card, install


@pytest.mark.unsloth
@pytest.mark.process
def test_this_machine_could_run(healthy: tuple[str, dict[str, Any]]) -> None:
    text, found = healthy
    assert text.startswith("finetune doctor: a run could start here.\n")
    assert found["verdict"] == "ready"
    assert {one["state"] for one in found["checks"]} <= {"ok", "warning", "unknown"}
    for name in bootstrap.LIBRARIES:
        assert found["versions"][name].startswith(version(name))
        assert re.search(rf"^  {name} +{re.escape(found['versions'][name])}$", text, re.MULTILINE), name
    assert found["stack"]["backend"] == "unsloth" and found["stack"]["device"] == "cpu"
    listed = [patch.__name__.rpartition(".")[2] for patch in patches.ALL]
    assert [patch["name"] for patch in found["stack"]["patches"]] == listed
    assert all(patch["applied"] == patch["needed"] and patch["reason"] for patch in found["stack"]["patches"])
    assert found["devices"] == [] and found["topology"] == []
    assert found["launcher"] == {"rank": 0, "local_rank": 0, "world_size": 1, "local_world_size": 1}
    assert {one["name"] for one in found["folders"]} >= {"output", "data cache", "Hugging Face Hub", "Triton cache"}


@pytest.mark.process
def test_what_is_unknown_has_its_reason(healthy: tuple[str, dict[str, Any]]) -> None:
    text, found = healthy
    for name in ("cuda", "nccl", "driver") if torch.version.cuda is None else ("driver",):
        assert found["versions"][name] is None and found["unknown"][name]
        assert f"unknown: {found['unknown'][name]}" in text
    why = "built without CUDA" if torch.version.cuda is None else "NVIDIA driver"
    assert "NVML" in found["unknown"] and why in found["unknown"]["devices"]


@pytest.mark.campaign
@pytest.mark.process
def test_without_nvml_and_without_unsloth(tmp_path: Path) -> None:
    gone = "raise ImportError('No module named {}')"
    fakes = {name: gone.format(name) for name in ("pynvml", "unsloth")}
    done = examine(tmp_path / "home", "--json", str(tmp_path / "report.json"), fakes=fakes)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["stack"]["backend"] == "transformers"
    assert "Unsloth cannot run here: No module named unsloth" in done.stdout
    assert "No module named pynvml" in found["unknown"]["NVML"]


@pytest.mark.process
def test_a_library_that_dies_is_named(tmp_path: Path) -> None:
    """Both processes that ask end without an answer: torch cannot be imported, Unsloth takes its process with it."""
    fakes = {"torch": "import os\nos.abort()"}
    done = examine(tmp_path / "home", "--json", str(tmp_path / "report.json"), fakes=fakes)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "stop: backend and patches: the subprocess died with SIGABRT" in done.stdout.splitlines()[1]
    found = json.loads((tmp_path / "report.json").read_text())
    assert "SIGABRT" in found["unknown"]["devices"]
    assert found["versions"]["transformers"] == version("transformers")  # what can be known is


@pytest.mark.parametrize("nvml", [True, False])
def test_devices_as_torch_and_the_driver_tell_them(nvml: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES=3,0: torch's GPU 0 is the driver's 3, found by its name and not by its place."""
    cards = [Card(), Card(), Card(), Card(processes=(99,))]
    install(monkeypatch, cards, {(0, 3): "PHB"}, peers=False, nvml=nvml, visible=[3, 0])
    monkeypatch.setattr(inspect, "computes_on", lambda index: index == 0 or torch.zeros(1)[3])
    found = inspect.inspect_devices()
    assert [device["free_gib"] for device in found["devices"]] == ([4.0, 1.0] if nvml else [7.0, None])
    assert [device["compute_capability"] for device in found["devices"]] == ["9.0", "9.0"]
    assert [device["computes"] for device in found["devices"]] == [True, False]
    assert "IndexError" in found["unknown"]["computing on GPU 1"]
    (pair,) = found["topology"]
    assert (pair["gpus"], pair["kind"], pair["peer_access"]) == ((0, 1), "PHB" if nvml else None, False)
    assert found["versions"]["cuda"] == "13.0" and found["versions"]["driver"] == ("580.1" if nvml else None)
    assert ("link of GPUs 0 and 1" in found["unknown"]) is not nvml
    assert found["driver_gpus"] == (4 if nvml else None)
    assert found["devices"][0]["other_processes"] == ((99,) if nvml else None)


def test_folders_that_are_not_there_yet(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert inspect.folder(tmp_path / "not" / "yet")["writable"] and inspect.folder(tmp_path)["disk_free_gib"] > 0
    assert not inspect.folder(tmp_path / "file" / "below")["writable"]
