"""`training.strategy`: which launch goes on, which is replaced, which is refused; and the learning-rate rules."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from finetune.config import load
from finetune.errors import UserError
from finetune.measure import strategy
from finetune.runtime.files import write_json
from finetune.runtime.ranks.distributed import Ranks


class Started(Exception):
    """A launcher took this process's place."""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A machine of some GPUs on which so many ranks were launched; `execve` raises in place of replacing the tests."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["train", "--training.strategy", "auto"])

    def execve(path: str, command: list[str], env: dict[str, str]) -> None:
        raise Started(command, env)

    monkeypatch.setattr(strategy.os, "execve", execve)

    def set_up(*, gpus: int, ranks: int = 1) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
        me = Ranks(rank=0, local_rank=0, world_size=ranks, local_world_size=ranks)
        monkeypatch.setattr(strategy.distributed, "ranks", lambda: me)

    return set_up


def config(choice: str | None, *extra: str):
    given = [] if choice is None else ["--training.strategy", choice]
    return load([*("--model.model_name_or_path", "m", "--data.train_file", "t.jsonl"), *given, *extra])


def advise(world: int, gpus: int) -> None:
    content = {"world_size": world, "reason": "measured so", "when": "today", "environment": {"NCCL_P2P_DISABLE": "1"}}
    write_json(strategy.advice_file(config("auto"), gpus), content)


def test_nothing_is_asked_nothing_happens(here: Any) -> None:
    here(gpus=8, ranks=1)
    strategy.apply(config(None))
    here(gpus=8, ranks=8)
    strategy.apply(config(None))
    strategy.apply(config("ddp"))


def test_single_refuses_several_ranks(here: Any) -> None:
    here(gpus=2, ranks=2)
    with pytest.raises(UserError, match="training.strategy is single, but 2 processes were launched"):
        strategy.apply(config("single"))
    here(gpus=2)
    strategy.apply(config("single"))


@pytest.mark.parametrize("choice", ["ddp", "shard"])
def test_ddp_and_shard_take_the_most_gpus_that_hold_the_batch(here: Any, choice: str) -> None:
    here(gpus=6)
    with pytest.raises(Started) as started:
        strategy.apply(config(choice))  # of a global batch of 16
    command, _ = started.value.args
    assert command[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4"]
    assert command[-4:] == ["-m", "finetune.train", "--training.strategy", "auto"]


@pytest.mark.parametrize(("gpus", "said"), [(1, "one GPU is visible"), (0, "no GPU is visible")])
def test_ddp_falls_back_to_one_and_says_why(here: Any, gpus: int, said: str, capsys: Any) -> None:
    here(gpus=gpus)
    strategy.apply(config("ddp"))
    assert f"training.strategy ddp: one device, because {said}: falling back to one" in capsys.readouterr().out


def test_ddp_with_a_batch_that_no_number_holds(here: Any, capsys: Any) -> None:
    here(gpus=4)
    strategy.apply(config("ddp", "--training.global_batch_size", "7"))
    said = " ".join(capsys.readouterr().out.split())
    assert "the global batch does not divide exactly over any number of GPUs from 2 to 4" in said


def test_auto_applies_the_advice_with_its_environment(here: Any, monkeypatch: Any, capsys: Any) -> None:
    here(gpus=4)
    advise(2, 4)
    with pytest.raises(Started) as started:
        strategy.apply(config("auto"))
    command, env = started.value.args
    assert command[5] == "2" and env["NCCL_P2P_DISABLE"] == "1"
    assert "2 ranks, because `finetune advise` has measured the job (today): measured so" in capsys.readouterr().out
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")  # what the user has set stays
    with pytest.raises(Started) as started:
        strategy.apply(config("auto"))
    assert started.value.args[1]["NCCL_P2P_DISABLE"] == "0"


def test_auto_stays_on_one_gpu_where_more_do_not_pay(here: Any, capsys: Any) -> None:
    here(gpus=4)
    advise(1, 4)
    strategy.apply(config("auto"))
    assert "one device, because `finetune advise` has measured the job (today): measured so" in capsys.readouterr().out


def test_ranks_that_are_launched_go_on_and_are_told(here: Any, capsys: Any) -> None:
    here(gpus=4, ranks=4)
    advise(1, 4)
    strategy.apply(config("auto"))
    said = " ".join(capsys.readouterr().out.split())
    assert "auto would take one device, because `finetune advise` has measured the job (today): measured so" in said
    assert "The 4 launched ranks continue" in said
    advise(4, 4)
    strategy.apply(config("auto"))
    assert "warning" not in capsys.readouterr().out


def test_without_advice_one_gpu_is_taken_and_the_command_that_measures_is_named(here: Any, capsys: Any) -> None:
    here(gpus=4)
    strategy.apply(config("auto"))
    said = " ".join(capsys.readouterr().out.split())
    assert "training.strategy auto: one device, because this job was not measured on these 4 GPUs." in said
    assert "`finetune advise` with the same arguments measures whether several are worth it" in said


def test_advice_for_another_machine_or_model_is_not_taken(here: Any) -> None:
    here(gpus=2)
    advise(2, 2)
    assert strategy.find_advice(config("auto"), 2) is not None
    assert strategy.find_advice(config("auto"), 4) is None
    assert strategy.find_advice(config("auto", "--data.max_length", "64"), 2) is None
    assert strategy.find_advice(config("auto", "--training.max_steps", "64"), 2) is not None  # length is not part of it
    strategy.advice_file(config("auto"), 2).write_text("{")
    assert strategy.find_advice(config("auto"), 2) is None


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["/x/finetune/train.py", "--a", "1"], (["-m", "finetune.train"], ["--a", "1"])),
        (["/usr/bin/finetune", "train", "--a"], (["-m", "finetune.train"], ["--a"])),
        (["my_notebook.py", "--a"], (["my_notebook.py"], ["--a"])),
    ],
)
def test_the_same_command_again(monkeypatch: Any, argv: list[str], expected: Any) -> None:
    name = "finetune.train" if argv[0].endswith("train.py") else None
    spec = None if name is None else type("Spec", (), {"name": name})
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    monkeypatch.setattr(sys, "argv", argv)
    assert strategy.training_command() == expected
