"""Times a real training in windows: the phases of its steps, and DDP's report of its communication."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.bench import rank
from finetune.engine.monitoring.phases import PhaseTimer
from finetune.runtime import communication
from finetune.runtime.machine import hardware
from finetune.runtime.types import JsonObject

if TYPE_CHECKING:
    from finetune.engine.training.trainer import SFTTrainer

PROFILED = 3  # steps traced by torch's profiler on a GPU


class WindowTimer(PhaseTimer):
    """A timer in addition to the run's own; transformers warns of two callbacks of one class."""


class Windows(TrainerCallback):
    """Times the steps of a trainer in `runs` windows of `steps`, each after `warm_up` steps. With several ranks, one
    more window of `steps` follows in which DDP reports the communication of every step.

    DDP's report costs a host-device sync per step, so only its own times are taken from that window.
    """

    def __init__(self, trainer: SFTTrainer, *, runs: int, warm_up: int, steps: int) -> None:
        self.trainer, self.runs, self.warm_up, self.steps = trainer, runs, warm_up, steps
        self.seconds: list[list[dict[str, float]]] = []  # per run and step, by phase
        self.communication: list[tuple[float, float]] = []  # per step of the last window: exposed and hidden seconds
        self.states: list[JsonObject | None] = []  # of this rank's GPU, at the start and at the end
        self.profile: dict[str, float] | None = None
        self._timer = WindowTimer(trainer, rank.device_type(), on=False)  # before this callback: it closes the step
        self._profiler: Any = None
        trainer.add_callback(self)

    @property
    def total(self) -> int:
        """Optimizer steps in all."""
        return self.runs * (self.warm_up + self.steps) + self._sampled

    @property
    def _sampled(self) -> int:
        return self.steps + 1 + PROFILED if self.trainer.args.world_size > 1 else 0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        measured = self.runs * (self.warm_up + self.steps)
        if state.global_step > measured:
            self._record_communication(state.global_step - measured)
        elif state.global_step % (self.warm_up + self.steps) == 0:
            self._close_window(last=state.global_step == measured)
        elif state.global_step % (self.warm_up + self.steps) == self.warm_up:
            self._open_window()
        rank.progress(state.global_step, self.total)

    def _open_window(self) -> None:
        rank.barrier()
        if not self.states:
            self.states.append(hardware.gpu_state())
        self._timer.start()

    def _close_window(self, *, last: bool) -> None:
        steps = self._timer.stop()
        self.seconds.append([{name: sum(intervals) for name, intervals in step.items()} for step in steps])
        if last:
            self.states.append(hardware.gpu_state())
            self._sample_every_step()

    def _sample_every_step(self) -> None:
        if self._sampled:
            wrapped: Any = self.trainer.model_wrapped
            wrapped._set_ddp_runtime_logging_sample_rate(1)

    def _record_communication(self, step: int) -> None:
        """Read DDP's report, which covers the step before; the first one is of an earlier sample."""
        if 2 <= step <= self.steps + 1:
            found = communication.exposed_and_hidden(self.trainer.model_wrapped)
            if found is not None:
                self.communication.append(found)
        if step == self.steps + 1 and rank.on_gpu():
            self._profiler = start_profiler()
        elif self._profiler is not None and step == self._sampled:
            self._profiler.stop()
            self.profile = communication.kernel_communication(self._profiler.events(), PROFILED)
            self._profiler = None


def start_profiler() -> Any:
    """Trace this rank's kernels."""
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CUDA])
    profiler.start()
    return profiler
