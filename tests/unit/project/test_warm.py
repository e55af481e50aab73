"""Ranks that are forked from a warm process compute what fresh processes do, and end as they do."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import launch, warm

pytestmark = pytest.mark.process

SAME = ("losses", "eval_loss_before", "eval_loss_after", "tokens", "plan", "patches", "batch", "backend", "versions")


def trained(how: str, backend: str, model: Path, data: Path, folder: Path) -> dict[str, Any]:
    arguments = [
        *("--model.model_name_or_path", str(model), "--data.train_file", str(data / "train.jsonl")),
        *("--data.eval_file", str(data / "eval.jsonl"), "--training.max_steps", "3", "--model.backend", backend),
        *("--training.global_batch_size", "4", "--logging.generate_samples", "0", "--lora.lora_dropout", "0.1"),
    ]
    run = launch.train(how, arguments, out=folder / how, cache=folder)
    return {name: run[name] for name in SAME} | {"weights": (folder / how / "adapter_model.safetensors").read_bytes()}


@pytest.mark.parametrize(
    ("backend", "warm_ranks", "fresh"),
    [
        pytest.param("transformers", "2 ranks", "torchrun", marks=pytest.mark.campaign),
        pytest.param("transformers", "1 rank", "python", marks=pytest.mark.campaign),
        pytest.param("unsloth", "2 ranks", "torchrun", marks=[pytest.mark.unsloth, pytest.mark.campaign]),
        pytest.param("unsloth", "1 rank", "python", marks=[pytest.mark.unsloth, pytest.mark.campaign]),
    ],
)
def test_forked_ranks_train_as_fresh_ones(
    backend: str, warm_ranks: str, fresh: str, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """To the last bit, dropout included; the second run of a server as well as its first."""
    expected = trained(fresh, backend, tiny_model, tiny_data, tmp_path)
    for attempt in ("first", "second"):
        (tmp_path / attempt).mkdir()
        assert trained(warm_ranks, backend, tiny_model, tiny_data, tmp_path / attempt) == expected


def test_all_workers_ask_the_same_server() -> None:
    assert warm.server("transformers").socket.exists()
    again = warm.Server("transformers")  # as in another worker
    assert again.process is None and again.socket == warm.server("transformers").socket


WORLD = """
import json, os, signal, sys
found = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MINE")}
found |= {"argv": sys.argv[1:], "path": sys.path[0], "name": __name__, "cwd": os.getcwd(), "pid": os.getpid()}
found["commands"] = sorted({"finetune.train", "finetune.cli", "finetune.drop_in.start"} & set(sys.modules))
found["sigterm"] = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
open(f"found-{os.environ.get('RANK', '0')}", "w").write(json.dumps(found))
"""


def test_a_rank_is_set_up_as_a_launcher_does(tmp_path: Path) -> None:
    script = tmp_path / "world.py"
    script.write_text(WORLD)
    done = launch.run("2 ranks", ["--model.backend", "transformers"], cache=tmp_path, script=script, MINE="yes")
    assert done.returncode == 0, done.stdout
    found = [json.loads((tmp_path / f"found-{rank}").read_text()) for rank in (0, 1)]
    assert [one["RANK"] for one in found] == [one["LOCAL_RANK"] for one in found] == ["0", "1"]
    for one in found:
        assert (one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"], one["MINE"], one["name"]) == ("2", "2", "yes", "__main__")
        assert one["argv"] == ["--model.backend", "transformers"] and one["cwd"] == one["path"] == str(tmp_path)
        assert one["commands"] == [] and one["sigterm"]
    done = launch.run("1 rank", ["--model.backend", "transformers"], cache=tmp_path, script=script)
    assert done.returncode == 0 and json.loads((tmp_path / "found-0").read_text())["RANK"] is None


@pytest.mark.parametrize(
    ("code", "expected", "said"),
    [
        ("import sys; print('out'); sys.exit(3)", 3, "out\n"),
        ("import sys; sys.exit('words')", 1, "words\n"),
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
    ],
)
def test_how_it_ends(code: str, expected: int, said: str, tmp_path: Path) -> None:
    done = launch.python(["-c", code], cache=tmp_path)
    assert done.returncode == expected and said in done.stdout + done.stderr


@pytest.mark.campaign
def test_what_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open('pids', 'w').write(f'{os.getpid()} {child.pid}')\ntime.sleep(600)\n"
    )
    server = warm.server("transformers")
    with pytest.raises(subprocess.TimeoutExpired):
        server.run(["-c", code], ranks=1, env=launch.environment(tmp_path), cwd=tmp_path, timeout=3)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    deadline = time.monotonic() + 60
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline, pids
        os.sched_yield()


def running(pid: int) -> bool:
    """Whether there is such a process, which has not ended and waits for its parent to ask."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_variable_that_is_read_on_import_asks_for_a_fresh_process(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="HF_HUB_OFFLINE is 1 in the warm process and 0 here"):
        launch.run("1 rank", ["--model.backend", "transformers"], cache=tmp_path, HF_HUB_OFFLINE="0")
