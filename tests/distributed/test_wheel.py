"""What `pip install` puts on a machine is enough: a wheel, installed without -e, trains from another folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.helpers import ROOT

pytestmark = [pytest.mark.process, pytest.mark.campaign]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel of this checkout in it; the dependencies are those of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("finetune", "patches"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    quiet = dict(check=True, capture_output=True, text=True, cwd=folder)
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)], **quiet)
    shutil.rmtree(source)
    (wheel,) = folder.glob("finetune_multigpu-*.whl")
    environment = folder / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    subprocess.run([*pip, "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)], **quiet)
    (packages,) = environment.glob("lib/python*/site-packages")
    # A folder that a .pth file adds has its own .pth files ignored: the editable install of the tests stays out.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment


def test_the_installed_wheel_runs_the_demo_from_another_folder(installed: Path, tmp_path: Path) -> None:
    """`finetune train --demo`, with nothing of the checkout in reach."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"FINETUNE_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [
        str(installed / "bin" / "finetune"),
        "train",
        "--demo",
        "--model.backend",
        "transformers",
        "--training.max_steps",
        "2",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert json.loads((tmp_path / "outputs" / "demo" / "run.json").read_text())["status"] == "done"
    where = "import finetune, patches; print(finetune.__file__, patches.__file__)"
    found = subprocess.run(
        [str(installed / "bin" / "python"), "-c", where], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert all(Path(file).is_relative_to(installed) for file in found.stdout.split()), found
