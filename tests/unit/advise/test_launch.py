"""Tests of finetune/advise/launch.py."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from finetune.advise import launch
from finetune.errors import UserError
from finetune.measure import dry_run_report
from finetune.parity import command as parity
from tests.helpers.advise import card, host


@pytest.mark.process
@pytest.mark.parametrize(("world", "on_cpu"), [(1, True), (2, True), (1, False), (4, False)])
def test_profiles_are_what_accelerate_reads_them_as(tmp_path: Path, world: int, on_cpu: bool) -> None:
    here = host() if on_cpu else host(*map(card, range(4)))
    plan = launch.plan(world, here, ["--config", "my file.yaml"], tmp_path / "advised")
    (tmp_path / "advised").mkdir()
    (tmp_path / "advised" / "launch.sh").symlink_to(tmp_path / "elsewhere")
    launch.write(tmp_path / "advised", plan, "because")
    assert not (tmp_path / "elsewhere").exists()  # a link is replaced, not followed
    read = load_config_from_file(str(tmp_path / "advised" / "profile.yaml"))
    assert read.num_processes == world and read.use_cpu is on_cpu
    shipped = "single.yaml" if world == 1 else "cpu_2.yaml" if on_cpu else "ddp_4.yaml"
    ours, theirs = (
        yaml.safe_load(path.read_text())
        for path in (tmp_path / "advised" / "profile.yaml", Path("accelerate_configs") / shipped)
    )
    assert ours == theirs | {"use_cpu": on_cpu}
    script = tmp_path / "advised" / "launch.sh"
    assert subprocess.run(["sh", "-n", script], check=False).returncode == 0
    assert "--config 'my file.yaml'" in script.read_text() and script.stat().st_mode & 0o111


def test_launch_lines_without_a_folder() -> None:
    assert launch.plan(2, host(), ["--x", "1"], None).line.startswith("torchrun --standalone --nproc_per_node 2 -m ")
    assert "--multi_gpu --num_processes 2" in launch.plan(2, host(card(0), card(1)), [], None).line
    assert launch.plan(1, host(), [], None).line.startswith("python -m finetune.train")


def test_secrets_of_the_command_line_stay_out_of_the_launch_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, word = "hf" + "_" + "aB3xK9qZ7mW2" * 3, "correct horse"
    arguments = ["--training.hub_token", word, f"--x.api_key={word}", "--model.loader_kwargs", f"{{name: {token}}}"]
    arguments += ["--training.seed", "7"]
    plan = launch.plan(1, host(), arguments, tmp_path)
    launch.write(tmp_path, plan, "because")
    monkeypatch.setattr("sys.argv", ["finetune", "train", "--dry-run", *arguments])
    for shown in (plan.line, (tmp_path / "launch.sh").read_text(), dry_run_report.launch_line(2)):
        assert token not in shown and word not in shown and "--training.seed 7" in shown

    failed = subprocess.CompletedProcess([], 2, stdout="", stderr=f"error: no {token}\n")
    monkeypatch.setattr(parity.subprocesses, "run", lambda *_, **__: failed)
    with pytest.raises(UserError) as said:
        parity.run_case(parity.Case(1, "ddp", "auto"), tmp_path / "run", 1, "", arguments)
    assert token not in str(said.value) and "***" in str(said.value)
