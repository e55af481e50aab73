"""Which process has started this one: a launcher, or a shell."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest

from finetune.runtime.ranks import launcher


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher."""
    for name in (launcher.PARENT, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    launcher.launch_id.cache_clear()
    yield
    launcher.launch_id.cache_clear()


def test_a_shell_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run under nohup outlives its shell, whatever that has exported."""
    assert launcher.find() is None and launcher.launch_id() is None
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv(launcher.PARENT, str(os.getppid() + 1))  # of a command that started the shell
    assert launcher.find() is None


def test_launchers_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = os.getppid()
    monkeypatch.setenv(launcher.PARENT, str(parent))
    assert launcher.find() == parent
    monkeypatch.delenv(launcher.PARENT)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert launcher.find() == parent
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    argv = ["python", "/bin/accelerate", "launch", "--cpu", "-m", "finetune.train"]
    monkeypatch.setattr(psutil, "Process", lambda pid: SimpleNamespace(cmdline=lambda: argv))
    assert launcher.find() == parent and launcher.accelerate_arguments() == ["--cpu", "-m", "finetune.train"]


def test_two_launches_with_one_run_id_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's default run id is `none`, and job scripts number their processes alike."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    first = launcher.launch_id()
    launcher.launch_id.cache_clear()
    assert first == launcher.launch_id() and first
    started = psutil.Process(os.getppid()).create_time() + 60
    monkeypatch.setattr(psutil, "Process", lambda pid: SimpleNamespace(create_time=lambda: started))
    launcher.launch_id.cache_clear()
    assert first != launcher.launch_id()
