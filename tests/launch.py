"""Start the shipped commands as a user does, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PROFILES = ROOT / "accelerate_configs"
TIMEOUT = 540  # seconds; a hang is a failure


def environment(cache: Path, **extra: str) -> dict[str, str]:
    """One thread a process (tests share few cores), a cache of its own, no hub."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in launcher}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"OMP_NUM_THREADS": "1", "FINETUNE_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    return env | own | extra


def command(how: str) -> list[str]:
    """ "python", "torchrun", or the name of a file in accelerate_configs/; what follows is a module or script."""
    if how == "python":
        return [sys.executable]
    if how == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    if how == "accelerate":
        return [sys.executable, "-m", "accelerate.commands.launch"]
    # Port 0 takes a free one: tests run side by side. The file itself is used as it is shipped.
    port = ["--main_process_port", "0"] if how in ("cpu_2.yaml", "ddp_2.yaml") else []
    return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(PROFILES / how), *port]


def run(
    how: str, arguments: list[str], *, cache: Path, script: Path | None = None, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run `finetune.train` (or `script`) to its end; stdout and stderr come back together as stdout."""
    target = [str(script)] if script else ["-m", "finetune.train"]
    return subprocess.run(
        [*command(how), *target, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
        env=environment(cache, **extra),
        cwd=cache,
        check=False,
    )


def train(how: str, arguments: list[str], *, out: Path, cache: Path, code: int = 0, **extra: Any) -> dict[str, Any]:
    """Train into `out` and return its run.json; the output is shown where the exit code is another than `code`."""
    done = run(how, [*arguments, "--training.output_dir", str(out)], cache=cache, **extra)
    assert done.returncode == code, done.stdout[-8000:]
    return read(out)


def read(out: Path) -> dict[str, Any]:
    """The run.json of an output folder."""
    return json.loads((out / "run.json").read_text())


def on_the_installed_unsloth(code: str, cache: Path, **switches: str) -> subprocess.CompletedProcess[str]:
    """Run Python code that imports Unsloth on this CPU, in a process of its own."""
    cpu = {"UNSLOTH_ALLOW_CPU": "1", "CUDA_VISIBLE_DEVICES": "", "UNSLOTH_DISABLE_STATISTICS": "1"}
    made = {"UNSLOTH_COMPILE_LOCATION": str(cache / "made")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment(cache, **cpu, **made, **switches),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def packed_against_alone(
    model: Path, backend: str, documents: list[int], *extra: str, cache: Path
) -> list[dict[str, Any]]:
    """What `tests.packed_against_alone` found, for packs of so many documents, with `extra` settings."""
    command = [sys.executable, "-m", "tests.packed_against_alone", str(model), backend, ",".join(map(str, documents))]
    command += extra
    done = subprocess.run(command, capture_output=True, text=True, env=environment(cache), check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [one["documents"] for one in found] == documents
    return found
