"""Tests of finetune/doctor/checks.py."""

from __future__ import annotations

import json
import re
import shutil
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from finetune.config import Config, load
from finetune.doctor import checks, tested_sets
from finetune.runtime.bootstrap import installed_version
from tests.helpers.doctor import config_file, examine, gpus


@pytest.mark.process
@pytest.mark.campaign
def test_a_batch_that_no_number_of_devices_here_can_hold(tmp_path: Path) -> None:
    """2 rows x 2 accumulated are 16 on four ranks alone: this machine can start one."""
    numbers = {"global_batch_size": 16, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    file = config_file(tmp_path / "home", **numbers)
    done = examine(tmp_path / "home", "--config", str(file), "--json", str(tmp_path / "report.json"))
    assert done.returncode == 1, done.stdout + done.stderr
    first, second = done.stdout.splitlines()[:2]
    assert first == "finetune doctor: a run would not start here."
    assert second.startswith("  stop: batch: training.global_batch_size 16 is not 1 (processes)")
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["verdict"] == "stop"
    assert found["stack"]["backend"] == "transformers" and found["stack"]["reason"] == "set by model.backend"
    assert not (tmp_path / "home" / "out").exists()


def verdict(name: str, found: dict[str, Any], *arguments: str) -> tuple[str, str]:
    states = {one["name"]: (one["state"], one["reason"]) for one in checks.judge(load(list(arguments)), found)}
    return states.get(name, ("absent", ""))


@pytest.mark.process
def test_two_healthy_gpus(two_gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tested = tested_sets.read()["GPU install"]["versions"]
    # The newest transformers and PEFT are a known bad pair.
    monkeypatch.setattr(checks, "installed_version", lambda name: tested.get(name) or installed_version(name))
    two_gpus["versions"] |= tested | {"torch": tested["torch"] + "+cu130"}
    states = {one["name"]: one["state"] for one in checks.judge(Config(), two_gpus)}
    assert set(states.values()) == {"ok"}, states
    assert verdict("devices", two_gpus) == ("ok", "2 x NVIDIA H200; each ran a kernel")


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "change", "state", "words"),
    [
        (
            "one device per rank",
            {"launcher": {"world_size": 4, "local_world_size": 4}},
            "stop",
            "4 processes .* 2 GPUs",
        ),
        ("one device per rank", {"launcher": {"error": "RANK is missing"}}, "stop", "RANK is missing"),
        ("devices", {"devices": [gpus(1)[0] | {"computes": False}]}, "stop", "computing on GPU 0 fails"),
        ("devices", {"devices": [], "unknown": {"devices": "too old"}}, "warning", "driver has 2 GPUs .*too old.* CPU"),
        ("GPU memory", {"devices": [gpus(1)[0] | {"free_gib": 9.0}]}, "warning", "GPU 0 has 9.0 of 139.8 GiB free"),
        ("GPU memory", {"devices": [gpus(1)[0] | {"free_gib": None}]}, "absent", ""),
        ("GPU memory", {"devices": [gpus(1)[0] | {"other_processes": [7]}]}, "warning", "GPU 0 has 1 other process"),
        ("like GPUs", {"differences": ["name: A, B"]}, "warning", "the slowest .name: A, B"),
        ("like GPUs", {"devices": gpus(1)}, "absent", ""),
        ("backend and patches", {"stack": {"error": "patch x: its probe failed"}}, "stop", "patch x: its probe failed"),
        ("shared memory", {"machine": {"shared_memory_gib": 0.0625}}, "warning", "--shm-size=1g"),
        ("shared memory", {"machine": {"shared_memory_gib": None}}, "absent", ""),
    ],
)
def test_what_is_wrong_is_said(two_gpus: dict[str, Any], name: str, change: dict, state: str, words: str) -> None:
    found = two_gpus | change
    got, reason = verdict(name, found)
    assert got == state, (got, reason)
    assert re.search(words, reason), reason


@pytest.mark.process
def test_folders_that_cannot_serve(two_gpus: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_name = {one["name"]: one for one in two_gpus["folders"]}
    by_name["Triton cache"]["file_system"] = "nfs4"
    by_name["data cache"]["writable"] = False
    assert "TRITON_CACHE_DIR" in verdict("Triton cache", two_gpus)[1]
    assert verdict("data cache", two_gpus)[0] == "stop"
    assert verdict("Triton cache", two_gpus | {"devices": []})[0] == "absent"  # nothing compiles with Triton there

    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")  # the model: a name would be looked for on the Hub
    data = ("--model.model_name_or_path", str(tmp_path), "--data.train_file", str(tmp_path / "*.csv"))
    held = verdict("output folder", two_gpus, *data, "--training.output_dir", str(tmp_path))
    assert held[0] == "stop" and "another run" in held[1]
    missing = verdict("model and data files", two_gpus, *data)
    assert missing[0] == "stop" and "csv" in missing[1]

    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(total=9, free=2**20))
    assert verdict("output folder", two_gpus)[0] == "stop"


@pytest.mark.process
def test_batch_on_the_gpus_that_are_here(two_gpus: dict[str, Any]) -> None:
    data = ("--model.model_name_or_path", "m", "--data.train_file", "x.jsonl", "--training.global_batch_size")
    assert verdict("batch", two_gpus, *data, "16") == ("ok", "exact on 2 ranks")
    state, reason = verdict("batch", two_gpus, *data, "15")
    assert state == "warning" and reason.startswith("not all 2 GPUs here can be used, but 1: ")
    four = two_gpus | {"launcher": {"world_size": 4, "local_world_size": 2}}
    assert verdict("batch", four, *data, "6")[0] == "stop"  # on the ranks that were launched, nothing else counts
    assert verdict("batch", two_gpus)[0] == "absent"  # the demo fits any number


@pytest.mark.process
def test_versions_that_are_missing_or_not_tested(two_gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def found_with(*texts: str) -> tuple[str, str]:
        monkeypatch.setattr(checks, "requirements", lambda: list(texts))
        return verdict("versions", two_gpus)

    assert found_with("torch>=2", 'nowhere-at-all; extra == "unsloth"', 'pytest>=999; extra == "dev"')[0] == "ok"
    assert found_with("nowhere-at-all>=1", "torch>=2")[0] == "stop"
    state, reason = found_with("torch>=999", 'rich>=999; extra == "unsloth"')
    assert state == "warning" and f"torch {version('torch')} is not >=999" in reason and "rich" in reason
    monkeypatch.setattr(checks, "requirements", lambda: None)
    assert verdict("versions", two_gpus)[0] == "unknown"


def test_requirements_are_those_of_pyproject() -> None:
    needed = checks.requirements()
    assert needed is not None and any(text.startswith("torch>=") for text in needed)
    assert any(text.startswith("unsloth>=") and "extra" in text for text in needed)


@pytest.mark.process
def test_four_bit_weights_need_bitsandbytes(two_gpus: dict[str, Any]) -> None:
    four_bit = ("--model.model_name_or_path", "m", "--data.train_file", "x.jsonl", "--model.load_in_4bit")
    assert verdict("4-bit weights", two_gpus, *four_bit)[0] == "ok"
    two_gpus["versions"]["bitsandbytes"] = None
    assert verdict("4-bit weights", two_gpus, *four_bit)[0] == "stop"
