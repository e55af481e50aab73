"""Where the time of a real training step goes: marks at the trainer's boundaries, and DDP's own account of its
communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from finetune.bench import rank
from finetune.runtime import communication, hardware

PHASES = ("data", "forward", "backward", "optimizer", "other")
PROFILED = 3  # steps that torch's profiler traces on a GPU


class Phases(TrainerCallback):
    """Times the steps of a trainer in windows: `runs` times `warm_up` steps that are not counted and `steps` that are,
    and then, with several ranks, one window of `steps` in which DDP accounts for every step.

    DDP's account makes the host wait for the device once a step, so no time is taken from that window but DDP's own.
    """

    def __init__(self, trainer: Any, *, runs: int, warm_up: int, steps: int) -> None:
        self.trainer, self.runs, self.warm_up, self.steps = trainer, runs, warm_up, steps
        self.seconds: list[list[dict[str, float]]] = []  # of each run, of each step, by phase
        self.communication: list[tuple[float, float]] = []  # of each step of the last window: exposed and hidden
        self.states: list[Any] = []  # GPU of this rank, at the start and at the end
        self.profile: dict[str, float] | None = None
        self._clock, self._labels = rank.Clock(), []
        self._profiler: Any = None
        trainer.get_batch_samples = self._between("data", trainer.get_batch_samples)
        trainer.compute_loss = self._between("forward", trainer.compute_loss)
        trainer.accelerator.backward = self._between("backward", trainer.accelerator.backward)
        trainer.add_callback(self)

    @property
    def total(self) -> int:
        """Optimizer steps in all."""
        return self.runs * (self.warm_up + self.steps) + self._sampled

    @property
    def _sampled(self) -> int:
        return self.steps + 1 + PROFILED if self.trainer.args.world_size > 1 else 0

    def _between(self, label: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            self._mark("other")
            result = call(*arguments, **named)
            self._mark(label)
            return result

        return timed

    def _mark(self, label: str) -> None:
        """What has passed since the last mark belongs to `label`."""
        if self._labels:  # inside a window
            self._clock.mark()
            self._labels.append(label)

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._mark("optimizer")  # clipping

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._mark("optimizer")

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._mark("end")
        measured = self.runs * (self.warm_up + self.steps)
        if state.global_step > measured:
            self._account(state.global_step - measured)
        elif state.global_step % (self.warm_up + self.steps) == 0:
            self._close_window(last=state.global_step == measured)
        elif state.global_step % (self.warm_up + self.steps) == self.warm_up:
            self._open_window()
        rank.progress(state.global_step, self.total)

    def _open_window(self) -> None:
        rank.barrier()
        if not self.states:
            self.states.append(hardware.gpu_state())
        self._clock.mark()
        self._labels = ["start"]

    def _close_window(self, *, last: bool) -> None:
        self.seconds.append(split(self._labels, self._clock.seconds()))
        self._labels = []
        if last:
            self.states.append(hardware.gpu_state())
            self._sample_every_step()

    def _sample_every_step(self) -> None:
        if self._sampled:
            self.trainer.model_wrapped._set_ddp_runtime_logging_sample_rate(1)

    def _account(self, step: int) -> None:
        """DDP tells of a step when the next one has begun; the first reading is of an earlier sample."""
        if 2 <= step <= self.steps + 1:
            found = communication.exposed_and_hidden(self.trainer.model_wrapped)
            if found is not None:
                self.communication.append(found)
        if step == self.steps + 1 and rank.on_gpu():
            self._profiler = start_profiler()
        elif self._profiler is not None and step == self._sampled:
            self._profiler.stop()
            self.profile = communication.split_of_kernels(self._profiler.events(), PROFILED)
            self._profiler = None


def split(labels: Sequence[str], seconds: Sequence[float]) -> list[dict[str, float]]:
    """Seconds of each step by phase, from marks: `seconds[k]` lies between marks k and k + 1 and belongs to
    `labels[k + 1]`. A mark "end" closes a step, and what lies before it is other."""
    steps: list[dict[str, float]] = []
    step: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    for label, passed in zip(labels[1:], seconds, strict=True):
        step["other" if label == "end" else label] += passed
        if label == "end":
            steps.append(step)
            step = dict.fromkeys(PHASES, 0.0)
    return steps


def start_profiler() -> Any:
    """Trace this rank's kernels."""
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CUDA])
    profiler.start()
    return profiler
