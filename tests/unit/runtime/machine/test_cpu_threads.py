"""One rule for the threads of a CPU run, whatever started it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from finetune.runtime import command
from finetune.runtime.machine import cpu_threads
from finetune.runtime.ranks import distributed, launcher
from tests.helpers import launch, tiny


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(2, 1, 2), (2, 2, 1), (2, 4, 1), (16, 3, 5)])
def test_the_rule(cores: int, ranks: int, threads: int) -> None:
    assert cpu_threads.default_threads(cores, ranks) == threads


@pytest.mark.parametrize(
    ("library", "own", "before", "option", "given"),
    [
        (False, "3", None, None, 3),  # `python -m`: the user's
        (False, None, None, None, None),
        (True, "1", None, None, None),  # a launcher's own
        (True, "3", "3", None, 3),  # set before the launcher started
        (True, "5", None, 5, 5),  # accelerate launch --num_cpu_threads_per_process 5
        (True, "many", "many", None, None),
        (False, "4,2", None, None, 4),
    ],
)
def test_what_the_user_has_set_is_kept(
    monkeypatch: pytest.MonkeyPatch,
    library: bool,
    own: str | None,
    before: str | None,
    option: int | None,
    given: object,
) -> None:
    monkeypatch.delenv(cpu_threads.VARIABLE, raising=False)
    if own is not None:
        monkeypatch.setenv(cpu_threads.VARIABLE, own)
    monkeypatch.setattr(launcher, "is_library", lambda: library)
    monkeypatch.setattr(launcher, "environment", lambda: {} if before is None else {cpu_threads.VARIABLE: before})
    monkeypatch.setattr(distributed, "launcher_profile", lambda: {cpu_threads.PER_PROCESS: option})
    assert cpu_threads.user_threads() == given


@pytest.mark.parametrize(("text", "cpus"), [("max 100000", 64), ("350000 100000", 3), ("50000 100000", 1), ("?", 64)])
def test_a_containers_quota_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, cpus: int) -> None:
    (tmp_path / "cpu.max").write_text(f"{text}\n")
    monkeypatch.setattr(cpu_threads, "QUOTAS", ((tmp_path / "cpu.max",),))
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64), raising=False)
    assert cpu_threads.cores() == cpus


def test_threads_that_spin_keep_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is imported here already, as in a script that imports it first."""
    chosen: list[int] = []
    monkeypatch.setattr(cpu_threads, "spinning", False)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(cpu_threads, "user_threads", lambda: 3)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    cpu_threads.sleep_while_waiting()
    cpu_threads.set_threads("cpu")
    assert chosen == [3]
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr(Path, "exists", lambda path: False)  # no GPU
    cpu_threads.sleep_while_waiting()
    cpu_threads.set_threads("cpu")
    cpu_threads.set_threads("cuda")
    assert chosen == [3]


def test_the_policy_is_set_before_a_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it imports: a dry run asks torch for GPUs before the backend starts."""
    asked: list[bool] = []
    monkeypatch.setattr(cpu_threads, "sleep_while_waiting", lambda: asked.append(True))
    assert command.run_guarded(lambda: 0 if asked else 1) == 0


@pytest.mark.process
@pytest.mark.campaign
@pytest.mark.parametrize("how", ["python", "accelerate"])
def test_launchers_and_the_dry_run_use_the_same_number(tiny_model: Path, tmp_path: Path, how: str) -> None:
    tiny.make_rows(tmp_path / "rows.jsonl", 20)
    report = tmp_path / "threads"
    script = tmp_path / "own.py"
    script.write_text(
        "import sys\n"
        "from finetune.runtime import bootstrap, command\n"
        "def run():\n"
        "    import os, torch\n"
        "    bootstrap.start('transformers')\n"
        f"    open({str(report)!r}, 'w').write(f'{{torch.get_num_threads()}} {{os.environ[\"OMP_WAIT_POLICY\"]}}')\n"
        "    return 0\n"
        "sys.exit(command.run_guarded(run))\n"
    )
    env = launch.environment(tmp_path, CUDA_VISIBLE_DEVICES="")
    del env["OMP_NUM_THREADS"]
    more = ["--cpu", "--num_processes", "1"] if how == "accelerate" else []
    command_line = [*launch.command(how), *more, str(script)]
    done = subprocess.run(command_line, env=env, capture_output=True, text=True, timeout=launch.TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    policy = "PASSIVE" if not Path("/dev/nvidiactl").exists() else ""
    assert report.read_text() == f"{cpu_threads.default_threads(cpu_threads.cores(), 1)} {policy}"
