"""What a run logs while it trains (TensorBoard, progress), and the request to stop."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerCallback, TrainerControl, TrainerState

from finetune.data.layout import Layout
from finetune.data.plan import Plan
from finetune.engine import invariants, metrics
from finetune.engine.metrics import ModelSize
from finetune.errors import RunError
from finetune.runtime import communication, disk, distributed, interrupt
from finetune.runtime.clock import Clock
from finetune.runtime.hardware import Hardware


class StopOnRequest(TrainerCallback):
    """Ctrl-C or SIGTERM on any rank: all ranks save a checkpoint after the same step and end the training."""

    def __init__(self) -> None:
        self.stopped = False
        self._flag = distributed.DelayedFlag()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        interrupt.step_ended()
        if self._flag.ask(interrupt.requested()):
            self.stopped = True
            interrupt.drop_closed_output()  # of a launcher or `tee` that the same signal has ended
            control.should_log = True  # or the steps since the last record would be missing from run.json
            control.should_save = True
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._flag.settle()  # no rank leaves while another waits for its answer


class Profile(TrainerCallback):
    """Traces a few steps with torch's profiler, each rank into a file that chrome://tracing and Perfetto open."""

    SKIPPED = 3  # steps before the trace: compilation and warm-up

    def __init__(self, folder: Path, steps: int) -> None:
        me = distributed.ranks()
        self._file = folder / f"trace-rank-{me.rank}.json"
        self._steps = steps
        self._profiler: torch.profiler.profile | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=self.SKIPPED - 1, warmup=1, active=self._steps, repeat=1),
            on_trace_ready=self._export,
            record_shapes=True,
        )
        self._profiler.start()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._profiler is not None:
            self._profiler.step()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _export(self, profiler: torch.profiler.profile) -> None:
        """Write the trace. A disk that cannot take it costs the trace, not the training."""
        try:
            profiler.export_chrome_trace(str(self._file))
        except (OSError, RuntimeError) as error:
            sys.stderr.write(f"warning: {self._file} was not written ({error}). The training continues.\n")


class FirstGradients(TrainerCallback):
    """Looks at the gradients of the first step, once."""

    def __init__(self) -> None:
        self._done = False

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not self._done:
            invariants.check_gradients(kwargs["model"])
            self._done = True


class ParityDump(TrainerCallback):
    """Writes, on rank 0, what `finetune parity` compares: the gradient of the first step, summed over ranks and not yet
    clipped; its norm at every step; and the trained weights after the last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._norms: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        gradient = {name: p.grad for name, p in self._trained(kwargs["model"])}
        self._norms.append(torch.nn.utils.get_total_norm(gradient.values()))
        if state.global_step == 0:
            self._save("gradient", gradient)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._save("weights", {name: p.detach() for name, p in self._trained(kwargs["model"])})
        self._save("norms", {"norms": torch.stack(self._norms)})

    @staticmethod
    def _trained(model: Any) -> list[tuple[str, Any]]:
        return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]

    def _save(self, name: str, tensors: dict[str, Any]) -> None:
        if distributed.ranks().is_main:
            plain = {key.removeprefix("module."): tensor.contiguous() for key, tensor in tensors.items()}
            file = self._folder / f"{name}.safetensors"
            try:
                save_file(plain, file)
            except SafetensorError as error:  # wraps the operating system's error in a text
                raise RunError(f"{file} cannot be written: {error}. Free some space, then run again.") from error


class EventFile:
    """TensorBoard's event file, made at the first write. If the disk fails it warns once and drops all further events:
    the training and its checkpoints do not depend on it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self.warning: str | None = None  # why events were dropped

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """As SummaryWriter.add_scalar."""
        self._write("add_scalar", tag, value, step)

    def add_text(self, tag: str, text: str, step: int) -> None:
        """As SummaryWriter.add_text."""
        self._write("add_text", tag, text, step)

    def add_histogram(self, tag: str, values: Any, step: int) -> None:
        """As SummaryWriter.add_histogram."""
        self._write("add_histogram", tag, values, step)

    def close(self) -> None:
        """Write what is pending and close the file."""
        if self._writer is not None:
            with self._dropping():
                self._writer.close()
            self._writer = None

    def _write(self, method: str, *arguments: Any) -> None:
        if self.warning is not None:
            return
        with self._dropping():
            if self._writer is None:
                _quiet_event_thread()
                self._writer = SummaryWriter(str(self._folder))
            getattr(self._writer, method)(*arguments)

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # of its background thread, too: it surfaces at a later write
            why = disk.reason(error)
            if why is None:
                raise
            self._writer = None
            if self.warning is None:
                self.warning = f"{why}: TensorBoard's events in {self._folder} are incomplete."
                sys.stderr.write(f"warning: {self.warning} The training continues without TensorBoard.\n")


def _quiet_event_thread() -> None:
    """Keep Python from printing the traceback of a disk error in the thread that writes events."""
    previous = threading.excepthook
    if getattr(previous, "of_event_files", False):
        return

    def hook(args: threading.ExceptHookArgs) -> None:
        of_writer = type(args.thread).__name__ == "_AsyncWriterThread"
        if not (of_writer and args.exc_value is not None and disk.reason(args.exc_value)):
            previous(args)

    hook.of_event_files = True  # pyright: ignore[reportFunctionMemberAccess]
    threading.excepthook = hook


class RunLogger(TrainerCallback):
    """Measures the run; at logging steps writes TensorBoard (rank 0) and adds to what run.json will hold.

    The host waits for the device only here, once per `logging_steps`.
    """

    def __init__(
        self,
        *,
        folder: Path | None,
        plan: Plan,
        layout: Layout,
        hardware: Hardware,
        size: ModelSize,
        texts: dict[str, str],
        progress: ProgressLines | None,
    ) -> None:
        """
        Args:
            folder: of the TensorBoard events; None on ranks that do not write.
            layout: what the rows of the plan are made of.
            texts: shown as text in TensorBoard.
        """
        self.writer = EventFile(folder) if folder is not None else None
        self.plan, self.layout = plan, layout
        self.tokens, self.squared_lengths = layout.tokens, layout.squared_lengths
        self.hardware, self.size, self.texts, self.progress = hardware, size, texts, progress
        self.clock = Clock(hardware.device)
        self.trainer: Any = None  # set by the caller once the trainer exists
        self.losses: list[float] = []
        self.step_seconds: list[float] = []
        self.tokens_seen = 0
        self.first_step_at: float | None = None
        self._window = [0, 0]  # tokens and squared lengths since the last record
        self._measured = [0, 0, 0.0]  # the same and seconds, over all steps but the first, which compiles
        self._accounted: tuple[float, float] | None = None  # DDP's last report
        self._exposed: list[float] = []  # seconds of communication of the steps that DDP accounts for

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.writer:
            for name, text in self.texts.items():
                self.writer.add_text(name, f"```\n{text}\n```", state.global_step)
            self.writer.add_histogram("data/document length (tokens)", self.layout.rows.lengths, state.global_step)
        self._first_step = state.global_step + 1
        # A resumed run goes on counting where the checkpoint stopped.
        epoch, step = divmod(state.global_step, self.plan.steps_per_epoch)
        self.tokens_seen = epoch * int(self.tokens.sum())
        self.tokens_seen += sum(int(self.tokens[self.plan.step_rows(epoch, k)].sum()) for k in range(step))
        self.clock.mark()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.clock.mark()
        state.epoch = state.global_step / self.plan.steps_per_epoch  # transformers counts a resumed epoch from zero
        rows = self._rows(state.global_step - 1)
        tokens, squares = int(self.tokens[rows].sum()), int(self.squared_lengths[rows].sum())
        self._window[0] += tokens
        self._window[1] += squares
        self.tokens_seen += tokens
        if state.global_step == self._first_step:
            # Compilation and allocation happen here; the rates start after it.
            self.clock.drain()
            self.first_step_at = time.time()
            self._window = [0, 0]
        self._account(state.global_step - self._first_step + 1)
        if state.global_step >= state.max_steps:
            control.should_log = True
        if self.progress:
            self.progress.step(state)

    def _account(self, step: int) -> None:
        """Note DDP's account of the step before this run's `step`, where it has one; the first step compiles."""
        if step > 2 and (step - 1 <= communication.DDP_SAMPLES or (step - 1) % communication.DDP_INTERVAL == 0):
            found = communication.exposed_and_hidden(self.trainer.model_wrapped)
            if found is not None and found != self._accounted:  # a step that reduced twice has used up a sample
                self._exposed.append(found[0])
            self._accounted = found

    def _rows(self, step: int) -> Any:
        return self.plan.step_rows(*divmod(step, self.plan.steps_per_epoch))

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict | None = None, **kwargs: Any
    ) -> None:
        logs = logs or {}
        if "eval_loss" in logs:
            self._scalar("eval/loss (nats per token)", logs["eval_loss"], state.global_step)
        if "loss" not in logs:
            return
        losses = self.trainer.drain_step_losses()
        self.losses += losses
        seconds = self.clock.seconds()
        self.step_seconds += seconds
        tokens, squares = self._window
        self._window = [0, 0]
        gpus = distributed.ranks().world_size
        elapsed = sum(seconds)
        self._measured = [a + b for a, b in zip(self._measured, (tokens, squares, elapsed), strict=True)]
        per_gpu = metrics.rate(tokens / gpus, elapsed) if seconds else None
        utilisation = self._mfu(tokens, squares, elapsed)
        memory = distributed.gather_objects(peak_memory_gib())

        first = state.global_step - len(losses) + 1
        for step, loss in enumerate(losses, start=first):
            self._scalar("train/loss (nats per token)", loss, step)
        self._scalar("train/gradient norm", logs.get("grad_norm"), state.global_step)
        self._scalar("train/learning rate", logs.get("learning_rate"), state.global_step)
        self._scalar("train/tokens seen (tokens)", self.tokens_seen, state.global_step)
        self._scalar("train/epoch (epochs)", state.epoch, state.global_step)
        self._scalar("speed/tokens per second per GPU (tokens per s)", per_gpu, state.global_step)
        self._scalar("speed/step time (s)", metrics.median(seconds), state.global_step)
        self._scalar("speed/MFU (fraction of peak)", utilisation, state.global_step)
        for rank, gib in enumerate(memory):
            self._scalar(f"memory/peak of rank {rank} (GiB)", gib, state.global_step)
        if self.progress:
            self.progress.log(state, losses[-1] if losses else math.nan, logs.get("grad_norm"), per_gpu)
        bad = [step for step, loss in enumerate(losses, start=first) if not math.isfinite(loss)]
        if bad:
            raise RunError(
                f"The loss of step {bad[0]} is not finite ({losses[bad[0] - first]}). Further training is "
                "pointless. Lower training.learning_rate, set training.warmup_steps, or use model.dtype: bfloat16 in "
                "place of float16; then resume from the last checkpoint with training.resume_from_checkpoint: true."
            )

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.progress:
            self.progress.close()

    def close(self) -> None:
        """Flush and close the TensorBoard file."""
        if self.progress:
            self.progress.close()
        if self.writer:
            self.writer.close()

    def _scalar(self, tag: str, value: float | None, step: int) -> None:
        if self.writer and value is not None:
            self.writer.add_scalar(tag, float(value), step)

    def _mfu(self, tokens: int, squares: int, seconds: float) -> float | None:
        flops = metrics.training_flops(self.size, tokens=tokens, squared_lengths=squares)
        return metrics.mfu(flops, seconds, distributed.ranks().world_size, self.hardware.peak_bf16_tflops)

    def results(self) -> dict[str, Any]:
        """Fields of run.json. Rates and step times leave the first step out, which compiles."""
        tokens, squares, seconds = self._measured
        gpus = distributed.ranks().world_size
        return {
            "tokens": self.tokens_seen,
            "losses": self.losses,
            "tokens_per_second_per_gpu": metrics.rate(tokens / gpus, seconds) if seconds else None,
            "mfu": self._mfu(tokens, squares, seconds) if seconds else None,
            "step_seconds_median": metrics.median(self.step_seconds),
            **self._communication(),
            "peak_memory_gib": distributed.gather_objects(peak_memory_gib()),
            "warnings": [self.writer.warning] if self.writer and self.writer.warning else [],
        }

    def _communication(self) -> dict[str, Any]:
        """The share (0 to 1) of a step in which gradients travel and nothing is computed: the median over the steps
        that DDP accounts for, averaged over ranks, by the median step. Waiting for a slower rank is in it."""
        if distributed.ranks().world_size == 1:
            return {"exposed_communication_fraction": 0.0, "exposed_communication_unknown": None}
        known = [one for one in distributed.gather_objects(metrics.median(self._exposed)) if one is not None]
        step = metrics.median(self.step_seconds)
        if not known or not step:
            why = "DDP accounts for a step when the next one begins; the run was too short for that"
            return {"exposed_communication_fraction": None, "exposed_communication_unknown": why}
        share = sum(known) / len(known) / step
        return {"exposed_communication_fraction": share, "exposed_communication_unknown": None}


def peak_memory_gib() -> float:
    """The most that this rank has held: of its GPU's memory, or of the host's for a CPU run."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts KiB on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


class ProgressLines:
    """A progress bar on a terminal, one line per record elsewhere. For rank 0."""

    def __init__(self, console: Console, total: int) -> None:
        self.console = console
        self._bar: Progress | None = None
        self._total = total
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("training", total=total)
            self._bar.start()

    def step(self, state: TrainerState) -> None:
        """One optimizer step is done."""
        if self._bar:
            self._bar.update(self._task, completed=state.global_step)

    def log(self, state: TrainerState, loss: float, grad_norm: float | None, per_gpu: float | None) -> None:
        """Show the figures of a record."""
        parts = [f"loss {loss:.4f}"]
        if grad_norm is not None:
            parts.append(f"gradient norm {grad_norm:.3f}")
        if per_gpu is not None:
            parts.append(f"{per_gpu:,.0f} tokens/s per device")
        text = ", ".join(parts)
        if self._bar:
            self._bar.update(self._task, description=text)
        else:
            self.console.print(f"step {state.global_step}/{self._total}: {text}", highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar:
            self._bar.stop()
            self._bar = None
