"""How whole runs end: early, because the script's callback says so, and on a disk that fills up. In this process."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console
from transformers import TrainerCallback

from finetune import train
from finetune.config import load
from finetune.engine import record
from finetune.engine.checkpoint import tokenizer_files
from finetune.engine.session import building
from finetune.errors import RunError
from finetune.review import conclusion, main
from finetune.runtime import command, files
from finetune.runtime.ranks import interrupt
from tests.helpers.runs import give_trainer_to


def run(arguments: list[str]) -> int:
    return command.run_guarded(lambda: train.run(load(arguments)))


def test_the_last_lines_say_whether_it_learned(
    evaluating_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A learning rate that ruins the model, and one that does not."""
    out, lines, terminal = tmp_path / "out", [], io.StringIO()
    called = lambda self, text: text.replace("training.learning_rate", "LEARNING_RATE")  # noqa: E731  as a script's door
    monkeypatch.setattr("finetune.run.story.Door.named", called)
    monkeypatch.setattr(building, "console", lambda: Console(file=terminal, force_terminal=True, width=200))
    evaluating_run += [
        "--logging.logging_steps",
        "1",
        "--training.max_steps",
        "4",
        "--training.warmup_steps",
        "0",
        "--model.full_finetuning",
        "true",
    ]
    for more in (["--training.learning_rate", "3"], ["--training.learning_rate", "1e-2"]):
        assert run([*evaluating_run, *more, "--training.overwrite_output_dir", "true"]) == 0
        printed = capsys.readouterr().out
        assert "rediction" not in printed and "patched" not in printed  # none was made; doctor and run.json have them
        lines.append(printed.replace("\n", " ").partition("run.json are in ")[2])
        assert main([str(out), "--strict"]) == (1 if len(lines) == 1 else 0), capsys.readouterr().out
        capsys.readouterr()
    ruined, learned = lines
    # On a terminal, a run of so few log entries keeps them, and the held-out losses.
    shown = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", terminal.getvalue())
    assert len(re.findall(r"step \d/4: loss \d", shown)) == 8 and "step 4/4: held-out loss " in shown
    assert "Learning: The run made the model worse: held-out loss " in ruined and "Speed: 4 steps, too few" in ruined
    assert "Change: LEARNING_RATE: 5e-05 or lower (usual: 1e-5 to 5e-5 for full fine-tuning)" in ruined
    assert ruined.endswith(f"The evidence: finetune review {out} ")
    assert "Learning: held-out loss " in learned and "worse" not in learned
    assert learned.endswith(f"Next: finetune chat {out}. Charts and review: finetune dashboard {out} ")
    monkeypatch.setattr("finetune.review.assemble.review", lambda folders: 1 / 0)
    assert conclusion(out) == (["The run could not be reviewed: ZeroDivisionError: division by zero"], None)


def test_early_stopping_ends_the_run(
    evaluating_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The held-out loss never falls by 100 nats: of three evaluations two are no better than the first. A secret among
    the settings is in neither record of the run."""
    from transformers import EarlyStoppingCallback

    def add(trainer: Any) -> None:
        trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=100.0))
        building.complete_early_stopping(trainer)

    token = "hf" + "_" + "aB3xK9qZ7mW2" * 3
    evaluating_run += ["--json", str(tmp_path / "result.json"), "--data.system_prompt", f"Say {token}."]
    give_trainer_to(monkeypatch, add)
    assert run(evaluating_run) == 0
    for name in ("out/run.json", "result.json"):
        shown = (tmp_path / name).read_text()
        assert "***" in shown and token not in shown, name
    content = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (content["status"], content["steps"], content["total_steps"]) == ("done", 6, 12)
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


def test_weights_that_the_last_step_spoils_are_reported(
    evaluating_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss of the last step is that of the weights before it. Their evaluation is not a number."""

    def spoil(trainer: Any) -> None:
        class Spoil(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
                for parameter in model.parameters():
                    parameter.data.mul_(math.nan if parameter.requires_grad else 1.0)

        trainer.add_callback(Spoil())

    evaluating_run[evaluating_run.index("--training.max_steps") + 1] = "1"
    evaluating_run[evaluating_run.index("--training.eval_steps") + 1] = "0"
    give_trainer_to(monkeypatch, spoil)
    assert run(evaluating_run) == 1
    printed = capsys.readouterr().err
    assert "error: The evaluation loss after step 1 is not finite (nan). Lower training.learning_rate" in printed
    assert "Traceback" not in printed
    assert json.loads((tmp_path / "out" / "run.json").read_text())["status"] == "failed"


def test_a_disk_that_is_full_at_the_very_end(
    evaluating_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = record.write_json

    def write_until_done(path: Path, content: Any) -> None:
        if content.get("status") in ("done", "failed"):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, content)

    monkeypatch.setattr(record, "write_json", write_until_done)
    assert run(evaluating_run) == 1
    shown = capsys.readouterr().err
    assert "No space left on the disk" in shown and "run.json" in shown and "Traceback" not in shown
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_a_signal_while_a_failure_is_recorded_waits(
    evaluating_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """run.json says that the run failed, or that it was stopped before its first step; not that it is running."""
    write, deferred = record.write_json, []

    def look_and_write(path: Path, content: dict[str, Any]) -> None:
        if content.get("status") == status:
            deferred.append(interrupt.state.deferred)
        write(path, content)

    def fail(trainer: Any) -> None:
        if status == "interrupted":
            interrupt.request("SIGTERM")
            raise interrupt.Interrupted("SIGTERM")
        raise RunError("the fault of this test")

    monkeypatch.setattr(record, "write_json", look_and_write)
    monkeypatch.setattr(interrupt, "state", interrupt.State())
    give_trainer_to(monkeypatch, fail)
    assert run(evaluating_run) == (130 if status == "interrupted" else 1)
    found = json.loads((tmp_path / "out" / "run.json").read_text())
    assert deferred == [1] and found["status"] == status
    assert found.get("interrupted_by") == ("SIGTERM" if status == "interrupted" else None)


def test_the_configuration_of_a_run_repeats_it(
    evaluating_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """run.yaml has nothing left to choose, and the same losses to the last bit. No tokenizer is loaded to be saved."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tokenizer_files, "_save_pretrained_from", None)
    evaluating_run[evaluating_run.index("--training.global_batch_size") + 1] = "4"
    evaluating_run[evaluating_run.index("--training.max_steps") + 1] = "3"
    evaluating_run[evaluating_run.index("--training.eval_steps") + 1] = "0"
    given = [*evaluating_run, "--training.adam_beta2", "0.9", "--lora.r", "3", "--training.warmup_ratio", "0.5"]
    assert run([*given, "--training.per_device_train_batch_size", "2"]) == 0
    text = (tmp_path / "out" / "run.yaml").read_text()
    resolved = load(["--config", str(tmp_path / "out" / "run.yaml")])
    assert (resolved.model.backend, resolved.model.dtype) == ("transformers", "float32")
    assert (resolved.training.per_device_train_batch_size, resolved.training.global_batch_size) == (2, 4)
    assert resolved.training.master_weights == "float32" and "auto" not in text.partition("data:")[0]
    again = ["--config", str(tmp_path / "out" / "run.yaml"), "--training.output_dir", str(tmp_path / "again")]
    assert run(again) == 0
    first, second = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("out", "again"))
    assert first["losses"] == second["losses"] and len(first["losses"]) == 3
    assert first["final_files"] == second["final_files"]


def test_the_weights_are_read_while_the_libraries_are_imported(
    evaluating_run: list[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the system, to the last byte, unless they need more than half of the free memory."""
    weights, read = tiny_model / "model.safetensors", []

    def advised(descriptor: int, start: int, length: int, advice: int) -> None:
        read.append((os.readlink(f"/proc/self/fd/{descriptor}"), start, length, advice))

    monkeypatch.setattr(os, "posix_fadvise", advised)
    assert run([*evaluating_run, "--training.max_steps", "1"]) == 0
    for thread in (one for one in threading.enumerate() if one.name == "read-ahead"):
        thread.join()
    starts = range(0, weights.stat().st_size, 1 << 17)
    assert read == [(str(weights.resolve()), start, 1 << 17, os.POSIX_FADV_WILLNEED) for start in starts]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=weights.stat().st_size))
    monkeypatch.setattr(threading, "Thread", None)
    files.read_ahead([weights, tiny_model / "a link without its file.safetensors"])
