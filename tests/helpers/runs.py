"""Training runs in this process, for tests of what a run writes and how it resumes."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from finetune import train
from finetune.engine.checkpoint import checkpoints
from finetune.engine.session import building


class Runs:
    """Starts runs that share a model, data and a cache; `steps` has (step, param groups, model) of each step seen."""

    def __init__(self, folder: Path, monkeypatch: Any) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.groups: list[dict[str, Any]] = []
        self.model: Any = None

    def __call__(self, out: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
        """Run into `out`; returns its run.json, with what was seen of the optimizer in `groups`."""
        self.groups.clear()
        given = {
            "--model.model_name_or_path": str(self.folder / "model"),
            "--model.backend": "transformers",
            "--data.train_file": str(self.folder / "train.jsonl"),
            "--data.num_proc": "1",
            "--training.output_dir": str(out),
            "--training.global_batch_size": "4",
            "--training.learning_rate": "1e-2",
            "--logging.logging_steps": "1",
            "--logging.generate_samples": "0",
        }
        for name, value in zip(arguments[::2], arguments[1::2], strict=True):
            given[name] = value
        assert train.main([word for pair in given.items() for word in pair]) == code
        return json.loads((out / "run.json").read_text()) if (out / "run.json").is_file() else {}

    def watch(self, on_step: Callable[[Any, int], None] | None = None) -> None:
        """From now on note the optimizer's settings at each step; `on_step(trainer, step)` is called after it."""
        runs = self

        class Watch(transformers.TrainerCallback):
            trainer: Any = None

            def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                names = ("lr", "weight_decay", "betas")
                runs.groups.append({name: kwargs["optimizer"].param_groups[0][name] for name in names})
                runs.model = kwargs["model"]

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if on_step:
                    on_step(self.trainer, state.global_step)

        def add(trainer: Any) -> None:
            watch = Watch()
            watch.trainer = trainer
            trainer.add_callback(watch)

        give_trainer_to(self.monkeypatch, add)


def give_trainer_to(monkeypatch: pytest.MonkeyPatch, watch: Callable[[Any], object]) -> None:
    """Have each trainer of this process passed to `watch` after it is built."""
    build = building.build_trainer

    def build_trainer(*arguments: Any, **named: Any) -> building.BuiltTrainer:
        built = build(*arguments, **named)
        watch(built.trainer)
        return built

    monkeypatch.setattr(building, "build_trainer", build_trainer)


@contextlib.contextmanager
def in_this_process(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """A run takes over signals and draws from the global generators; both are put back."""
    monkeypatch.setenv("FINETUNE_CACHE", str(folder / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with torch.random.fork_rng():
        yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def make_checkpoint(output: Path, step: int) -> Path:
    """A checkpoint with a file that is no model's."""
    target = output / f"checkpoint-{step}"
    with checkpoints.staging(target) as folder:
        (folder / "weights.bin").write_bytes(b"x" * 100)
        checkpoints.seal(folder, {"step": step, "plan": "p"})
    return target
