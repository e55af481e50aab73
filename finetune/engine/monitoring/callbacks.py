"""Callbacks of the trainer: the request to stop, profiling, checks of the first gradients, dumps for parity."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.engine import invariants
from finetune.engine.sharding import shard
from finetune.errors import RunError, UserError
from finetune.runtime import files, user_code
from finetune.runtime.command import warn
from finetune.runtime.ranks import distributed, interrupt
from finetune.runtime.types import JsonObject, Model

EVENTS = tuple(name for name in dir(TrainerCallback) if name.startswith("on_"))


def user_callbacks(named: Sequence[tuple[str, str, object]]) -> list[TrainerCallback]:
    """Callbacks of the classes that logging.callbacks names, made without arguments. An exception in one of them
    becomes a RunError that names the class and the event.

    Args:
        named: (key, package.module:Class, the class) of the user's code.

    Raises:
        UserError: one is not a callback's class.
        RunError: one cannot be made.
    """
    found = []
    for key, name, kind in named:
        if key != "logging.callbacks":
            continue
        if not (isinstance(kind, type) and issubclass(kind, TrainerCallback)):
            raise UserError(f"{key}: {name} is not a class of transformers.TrainerCallback. Derive it from that.")
        with user_code.user_errors(key, name, "__init__"):
            callback = kind()
        for event in EVENTS:
            setattr(callback, event, _with_named_errors(getattr(callback, event), key, name, event))
        found.append(callback)
    return found


def _with_named_errors(method: Callable[..., object], key: str, name: str, event: str) -> Callable[..., object]:
    @functools.wraps(method)
    def call(*args: object, **kwargs: object) -> object:
        with user_code.user_errors(key, name, event):
            return method(*args, **kwargs)

    return call


class StopOnRequest(TrainerCallback):
    """Ctrl-C or SIGTERM on any rank: all ranks save a checkpoint after the same step and end the training."""

    def __init__(self) -> None:
        self.stopped = False
        self._flag = distributed.DelayedFlag()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        interrupt.step_ended()
        if self._flag.ask(interrupt.requested()):
            self.stopped = True
            interrupt.drop_closed_output()  # of a launcher or `tee` that the same signal has ended
            control.should_log = True  # or the steps since the last record would be missing from run.json
            control.should_save = True
            control.should_training_stop = True
            args.load_best_model_at_end = False  # the run is not over

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self._flag.settle()  # no rank leaves while another waits for its answer


class Profile(TrainerCallback):
    """Traces a few steps with torch's profiler, each rank into a file that chrome://tracing and Perfetto open."""

    SKIPPED = 3  # steps before the trace: compilation and warm-up

    def __init__(self, folder: Path, steps: int) -> None:
        me = distributed.ranks()
        self._file = folder / f"trace-rank-{me.rank}.json"
        self._steps = steps
        self._profiler: torch.profiler.profile | None = None

    def on_train_begin(self, *_: object, **kwargs: object) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=self.SKIPPED - 1, warmup=1, active=self._steps, repeat=1),
            on_trace_ready=self._export,
            record_shapes=True,
        )
        self._profiler.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self._profiler is not None:
            self._profiler.step()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _export(self, profiler: torch.profiler.profile) -> None:
        """Write the trace. A disk that cannot take it costs the trace, not the training."""
        files.remove(self._file)  # torch would follow a link
        try:
            profiler.export_chrome_trace(str(self._file))
        except (OSError, RuntimeError) as error:
            warn(f"{self._file} was not written ({error}). The training continues.")


class FirstGradients(TrainerCallback):
    """Looks at the gradients of the first step, once, and at the memory of a model that must be sharded."""

    def __init__(self, sharded: bool = False, weights: str = "float32") -> None:
        self._done, self._checks_memory, self._weights = False, sharded, weights

    def on_pre_optimizer_step(self, *_: object, **kwargs: Any) -> None:
        if not self._done:
            invariants.check_gradients(kwargs["model"])
            self._done = True

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._checks_memory:
            optimizer = str(getattr(args.optim, "value", args.optim))
            invariants.check_memory(kwargs["model"], kwargs["optimizer"], optimizer, self._weights)
            self._checks_memory = False


class ParityDump(TrainerCallback):
    """Writes, on rank 0, what `finetune parity` compares: the gradient of the first step, summed over ranks and not yet
    clipped; its norm at every step; and the trained weights after the last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._norms: list[torch.Tensor] = []

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        gradient = {name: p.grad for name, p in self._trained(kwargs["model"])}
        self._norms.append(shard.total_norm(gradient.values()))
        if state.global_step == 0:
            self._save("gradient", gradient)

    def on_train_end(self, *_: object, **kwargs: Any) -> None:
        self._save("weights", {name: p.detach() for name, p in self._trained(kwargs["model"])})
        self._save("norms", {"norms": torch.stack(self._norms)})

    @staticmethod
    def _trained(model: Model) -> list[tuple[str, Any]]:
        return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]

    def _save(self, name: str, tensors: JsonObject) -> None:
        plain = {}
        for key, tensor in tensors.items():
            gathered = shard.gather_full(tensor)  # on every rank, one at a time
            if distributed.ranks().is_main:
                plain[key.removeprefix("module.")] = gathered.cpu().contiguous()
        if distributed.ranks().is_main:
            file = self._folder / f"{name}.safetensors"
            try:
                save_file(plain, file)
            except SafetensorError as error:  # wraps the operating system's error in a text
                raise RunError(f"{file} cannot be written: {error}. Free some space, then run again.") from error
