"""The report on a machine: right on this one, able to say what would stop a run, and free of secrets."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import patches
from finetune.config import Config, load
from finetune.doctor import checks, inspect, pinned_versions, report
from finetune.runtime import bootstrap
from tests.helpers import ROOT, launch
from tests.helpers.nvml import Card, install

HUB_TOKEN, SECRET, KEY = "hf_" + "aBcD" * 8, "correct horse battery", "sk-" + "f00d" * 6


def examine(home: Path, *arguments: str, fakes: dict[str, str] | None = None, **extra: str) -> Any:
    """Run the shipped command with a home of its own; `fakes` are modules that stand in for installed ones."""
    home.mkdir(exist_ok=True)
    for name, source in (fakes or {}).items():
        (home / f"{name}.py").write_text(source)
    env = launch.environment(home / "cache", HOME=str(home), **extra)
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        env.pop(name, None)
    env["PYTHONPATH"] = os.pathsep.join([str(home), str(ROOT)])
    command = [sys.executable, "-m", "finetune", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=home, timeout=300, check=False)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """(text, JSON) of this machine, seen with secrets in the environment."""
    home = tmp_path_factory.mktemp("home") / "alice"
    done = examine(
        home,
        *("--json", str(home / "report.json")),
        HF_TOKEN=HUB_TOKEN,
        NCCL_SECRET_TOKEN=SECRET,
        MY_API_KEY="0123456789abcdef",
        NCCL_DEBUG="WARN",
        NCCL_DEBUG_FILE=f"{home}/{SECRET}/nccl.log",
        TORCH_SHOW=f"url=https://me:pass@host key={KEY}, 0123456789abcdef",
        UNRELATED="not to be shown",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((home / "report.json").read_text())


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
    assert found["accelerate_profile"] is None and found["batch"] == []
    assert {one["name"] for one in found["folders"]} >= {"output", "data cache", "Hugging Face Hub", "Triton cache"}


@pytest.mark.process
def test_what_is_unknown_has_its_reason(healthy: tuple[str, dict[str, Any]]) -> None:
    text, found = healthy
    for name in ("cuda", "nccl", "driver"):
        assert found["versions"][name] is None and found["unknown"][name]
        assert f"unknown: {found['unknown'][name]}" in text
    assert "NVML" in found["unknown"] and "built without CUDA" in found["unknown"]["devices"]


@pytest.mark.process
def test_text_can_be_pasted_as_it_is(healthy: tuple[str, dict[str, Any]]) -> None:
    text, _ = healthy
    assert text.isascii() and "\x1b" not in text
    assert "Not an error" not in text and "Unsloth 2" not in text.splitlines()[0]  # what libraries print stays out


@pytest.mark.process
def test_no_secret_and_no_home_is_shown(healthy: tuple[str, dict[str, Any]]) -> None:
    text, found = healthy
    for shown in (text, json.dumps(found)):
        for secret in (HUB_TOKEN, SECRET, KEY, "me:pass", "0123456789abcdef", "alice", "not to be shown", "HF_TOKEN"):
            assert secret not in shown, secret
    assert found["environment"]["NCCL_SECRET_TOKEN"] == "***"
    assert found["environment"]["NCCL_DEBUG"] == "WARN"
    assert found["environment"]["NCCL_DEBUG_FILE"] == "~/***/nccl.log"
    assert found["environment"]["TORCH_SHOW"] == "url=https://***@host key=***, ***"
    named = {
        *("FINETUNE_CACHE", "HF_HUB_OFFLINE", "OMP_NUM_THREADS"),
        *("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_SECRET_TOKEN", "TORCH_SHOW"),
    }
    others = set(found["environment"]) - named
    assert named <= set(found["environment"])
    assert all(name.startswith(inspect.SHOWN_PREFIXES) or name == "CUDA_VISIBLE_DEVICES" for name in others)
    assert "Triton cache" in text and "~/.triton/cache" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("401 for hf_AbCdEfGhIjKlMnOp at the Hub", "401 for *** at the Hub"),
        ("GET https://user:word@host/x", "GET https://***@host/x"),
        ("token='0123456789abcdef0123'", "token='***'"),
        ('{"api_key": "AbCdEfGhIjKlMnOpQrStUvWx"}', '{"api_key": "***"}'),
        ("/home/alice/x and /Users/bob: /root", "~/x and ~: ~"),
        ("/data/root/x, /homes/x and /opt/home/x/y", "/data/root/x, /homes/x and /opt/home/x/y"),
        ("unknown key: learning_rate; sk-learn, token: pad", "unknown key: learning_rate; sk-learn, token: pad"),
        ("sha256 of the wheel 0123456789abcdef0123", "sha256 of the wheel 0123456789abcdef0123"),
    ],
)
def test_masks(text: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if re.search("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", name):
            monkeypatch.delenv(name)
    assert report.without_secrets({"a": [text, 1, None]}) == {"a": [expected, 1, None]}


def test_values_of_secret_variables_are_masked_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "local-abc")
    monkeypatch.setenv("DB_PASSWORD", "local-abc-and-more")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "sometimes")  # no secret
    text = "local-abc-and-more, local-abc, sometimes"
    assert report.without_secrets(text) == "***, ***, sometimes"


# --- exit codes -----------------------------------------------------------------------------------------------------


def config_file(folder: Path, **training: Any) -> Path:
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text("{}")
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    settings = {
        "model": {"model_name_or_path": str(model), "backend": "transformers"},
        "data": {"train_file": str(folder / "rows.jsonl")},
        "training": {"output_dir": str(folder / "out"), "gradient_checkpointing": True, **training},
    }
    file = folder / "my.yaml"
    file.write_text(json.dumps(settings))  # YAML reads JSON
    return file


@pytest.mark.process
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
    assert [one["world_size"] for one in found["batch"]] == [1, 2, 4, 8]
    assert found["batch"][2] == {"world_size": 4, "per_device": 2, "accumulation": 2, "global_batch_size": 16}
    assert all("refused" in found["batch"][place] for place in (0, 1, 3))
    assert found["stack"]["backend"] == "transformers" and found["stack"]["reason"] == "set by model.backend"
    assert not (tmp_path / "home" / "out").exists()


@pytest.mark.process
def test_bad_input_is_2_and_help_is_0(tmp_path: Path) -> None:
    file = config_file(tmp_path / "home", learing_rate=1)
    done = examine(tmp_path / "home", "--config", str(file))
    assert done.returncode == 2 and "learning_rate" in done.stderr and done.stdout == ""
    assert examine(tmp_path / "home", "--config", "nowhere.yaml").returncode == 2
    done = examine(tmp_path / "home", "--help")
    assert done.returncode == 0 and "usage: finetune doctor" in done.stdout


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


@pytest.mark.process
def test_one_process_of_a_launch_speaks(tmp_path: Path) -> None:
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    done = examine(tmp_path / "home", **ranks)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# --- what would stop a run, on machines that this one is not --------------------------------------------------------


def gpus(count: int) -> list[dict[str, Any]]:
    card = {"name": "NVIDIA H200", "compute_capability": "9.0", "memory_gib": 139.8, "free_gib": 139.3}
    return [{"index": index, **card, "computes": True} for index in range(count)]


@pytest.fixture
def two_gpus(healthy: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """What `examine` would have found on a machine with two H200s."""
    found = copy.deepcopy(healthy[1])
    found |= {"devices": gpus(2), "driver_gpus": 2}
    return found


def verdict(name: str, found: dict[str, Any], *arguments: str) -> tuple[str, str]:
    states = {one["name"]: (one["state"], one["reason"]) for one in checks.judge(load(list(arguments)), found)}
    return states.get(name, ("absent", ""))


@pytest.mark.process
def test_two_healthy_gpus(two_gpus: dict[str, Any]) -> None:
    two_gpus["versions"] |= pinned_versions.GPU | {"torch": pinned_versions.GPU["torch"] + "+cu130"}
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
        (
            "accelerate's default profile",
            {"accelerate_profile": {"distributed_type": "MULTI_CPU", "num_processes": 4}},
            "warning",
            "MULTI_CPU starts one process and not 4",
        ),
        (
            "accelerate's default profile",
            {"accelerate_profile": {"distributed_type": "MULTI_GPU", "num_processes": 8, "num_machines": 2}},
            "warning",
            "starts 4 processes here and 2 GPUs are visible",
        ),
        ("accelerate's default profile", {"accelerate_profile": {"error": "not YAML"}}, "warning", "cannot be read"),
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
        monkeypatch.setattr(checks, "_requirements", lambda: list(texts))
        return verdict("versions", two_gpus)

    assert found_with("torch>=2", 'nowhere-at-all; extra == "unsloth"', 'pytest>=999; extra == "dev"')[0] == "ok"
    assert found_with("nowhere-at-all>=1", "torch>=2")[0] == "stop"
    state, reason = found_with("torch>=999", 'rich>=999; extra == "unsloth"')
    assert state == "warning" and f"torch {version('torch')} is not >=999" in reason and "rich" in reason
    monkeypatch.setattr(checks, "_requirements", lambda: None)
    assert verdict("versions", two_gpus)[0] == "unknown"


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


@pytest.mark.parametrize(
    ("devices", "pins"), [([], pinned_versions.CPU), (gpus(1), pinned_versions.GPU)], ids=["cpu", "gpu"]
)
def test_other_versions_than_the_pinned_ones_are_a_warning(devices: list[dict[str, Any]], pins: dict[str, str]) -> None:
    def found_with(**other: str | None) -> tuple[str, str]:
        verdict = checks.CHECKS["pinned versions"](Config(), {"devices": devices, "versions": pins | other})
        assert verdict is not None
        return verdict

    assert found_with(torch=pins["torch"] + "+cu130", unsloth=None)[0] == "ok"
    state, reason = found_with(trl="1.99.0")
    assert state == "warning" and f"trl 1.99.0 (pinned: {pins['trl']})" in reason and "torch" not in reason


def test_requirements_are_those_of_pyproject() -> None:
    needed = checks._requirements()
    assert needed is not None and any(text.startswith("torch>=") for text in needed)
    assert any(text.startswith("unsloth>=") and "extra" in text for text in needed)


@pytest.mark.process
def test_four_bit_weights_need_bitsandbytes(two_gpus: dict[str, Any]) -> None:
    four_bit = ("--model.model_name_or_path", "m", "--data.train_file", "x.jsonl", "--model.load_in_4bit")
    assert verdict("4-bit weights", two_gpus, *four_bit)[0] == "ok"
    two_gpus["versions"]["bitsandbytes"] = None
    assert verdict("4-bit weights", two_gpus, *four_bit)[0] == "stop"


# --- GPUs and their links, through a driver made of Python ----------------------------------------------------------


@pytest.mark.parametrize("nvml", [True, False])
def test_devices_as_torch_and_the_driver_tell_them(nvml: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES=3,0: torch's GPU 0 is the driver's 3, found by its name and not by its place."""
    cards = [Card(), Card(), Card(), Card(processes=(99,))]
    install(monkeypatch, cards, {(0, 3): "PHB"}, peers=False, nvml=nvml, visible=[3, 0])
    monkeypatch.setattr(inspect, "_computes", lambda index: index == 0 or torch.zeros(1)[3])
    found = inspect.look_at_devices()
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


# --- folders and the report -----------------------------------------------------------------------------------------


def test_folder_counts_a_file_once_and_gives_up_on_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "x").write_bytes(b"1" * 2**20)
    (tmp_path / "link").symlink_to(tmp_path / "blobs" / "x")
    (tmp_path / "loop").symlink_to(tmp_path)
    size = inspect.folder(tmp_path)["size_gib"]
    assert size == pytest.approx(2**-10, rel=0.01)
    later = inspect.folder(tmp_path / "not" / "yet")
    assert later["size_gib"] is None and later["size_unknown"] == "it does not exist yet" and later["writable"]
    assert not inspect.folder(tmp_path / "blobs" / "x" / "below")["writable"]
    monkeypatch.setattr(inspect, "MOST_FILES", 2)
    assert "more than 2 files" in inspect.folder(tmp_path)["size_unknown"]


def test_profile_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    assert inspect._default_profile() is None
    file = tmp_path / "accelerate" / "default_config.yaml"
    file.parent.mkdir()
    file.write_text((launch.PROFILES / "ddp_2.yaml").read_text() + "main_process_ip: 10.9.8.7\n")
    found = inspect._default_profile()
    assert found is not None and found["num_processes"] == 2 and "main_process_ip" not in found
    file.write_text("a: [")
    assert "error" in (inspect._default_profile() or {})


@pytest.mark.process
def test_report_of_many_gpus(two_gpus: dict[str, Any]) -> None:
    pairs = [{"gpus": [a, b], "kind": "NV18", "peer_access": True} for a in range(8) for b in range(a + 1, 8)]
    line = "8 x NVIDIA H200, NV18 between all pairs, peer access"
    found = two_gpus | {"devices": gpus(8), "topology": pairs, "topology_line": line}
    text = report.plain(found)
    assert f"  machine       {line}\n" in text
    assert "  all 28 pairs  NV18, peer access\n" in text
    assert "  GPU 7  NVIDIA H200, compute capability 9.0, 139.8 GiB, 139.3 free\n" in text
    pairs[3] |= {"kind": None, "peer_access": False}
    assert "  GPUs 0 and 4  unknown link, no peer access\n" in report.plain(found)


@pytest.mark.process
def test_a_terminal_gets_colours_and_the_same_words(
    two_gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # rich keeps the os.environ that it first saw; datasets puts a copy in its place when it maps in several processes.
    monkeypatch.setattr("rich.console.Console._environ", os.environ)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "400")
    found = two_gpus | {"checks": [{"name": "batch", "state": "stop", "reason": "does not [fit]"}]}
    report.show(found)
    shown = capsys.readouterr().out
    assert "\x1b[" in shown
    words = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert words.startswith("finetune doctor: a run would not start here.\n  stop: batch: does not [fit]\n")
    assert words.split() == report.plain(found).split()


# --- the page that a report is read with ----------------------------------------------------------------------------


def test_the_page_of_defects_names_what_exists() -> None:
    """Every test, patch and anchor that docs/defects.md names is there, and every patch is on the page."""
    page = (ROOT / "docs" / "defects.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:tests|patches|finetune|benchmarks)/[^`]*)`", page))
    assert len(named) > 40
    for name in named:
        path, _, function = name.partition("::")
        assert (ROOT / path).exists(), name
        if function:
            assert re.search(rf"^def {function}\(", (ROOT / path).read_text(), re.MULTILINE), name
    assert {f"patches/{patch.__name__.rpartition('.')[2]}.py" for patch in patches.ALL} <= named
    anchors = re.findall(r'<a id="([a-z0-9]+)">', page)
    assert len(anchors) == len(set(anchors)) and set(re.findall(r"\(#([a-z0-9]+)\)", page)) <= set(anchors)
