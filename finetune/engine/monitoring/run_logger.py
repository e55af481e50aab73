"""Logs a run while it trains: TensorBoard, ranks.jsonl and lines of progress; and collects the figures of run.json."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.data.layout import Layout
from finetune.data.plan import Plan
from finetune.engine.monitoring import metrics, peak_memory, tensorboard_pages, wrong_bits
from finetune.engine.monitoring.evaluation_log import EvaluationLog, evaluated_sets
from finetune.engine.monitoring.metrics import ModelSize
from finetune.engine.monitoring.monitor import Monitor, StepRecord
from finetune.engine.monitoring.progress import ProgressLines
from finetune.engine.monitoring.records import RecordWriter, StepCounter, Totals
from finetune.engine.monitoring.results import RunResults
from finetune.engine.monitoring.samples import SampleResult
from finetune.engine.monitoring.trackers import Tracker
from finetune.errors import RunError
from finetune.runtime import startup
from finetune.runtime.machine.hardware import Hardware
from finetune.runtime.ranks import distributed
from finetune.runtime.ranks.context_group import ALONE, ContextGroup
from finetune.runtime.tags import tag
from finetune.runtime.types import JsonObject

_LOWER_RATE = (
    "Lower training.learning_rate, set training.warmup_steps, or use model.dtype: bfloat16 instead of float16; then "
    "resume from the last checkpoint with training.resume_from_checkpoint: true."
)


@dataclass(kw_only=True)
class Dashboard:
    """What the logger cannot know by itself."""

    texts: dict[str, str] = field(default_factory=dict)  # Markdown pages by name, written when training begins
    # A sentence if a run with these losses of all steps, and these evaluations, diverges.
    divergence: Callable[[list[float], list[JsonObject]], str | None] | None = None
    samples: Callable[[], SampleResult] | None = None  # answers of the current model; called on every rank
    include_rows: bool = True  # whether prompts and answers may be shown


class RunLogger(TrainerCallback):
    """Measures the run; at logging steps writes TensorBoard (rank 0) and adds to what run.json will hold.

    Host and device synchronize only here, once per `logging_steps`.
    """

    def __init__(
        self,
        *,
        folder: Path | None,
        plan: Plan,
        layout: Layout,
        hardware: Hardware,
        size: ModelSize,
        progress: ProgressLines | None,
        start_step: int = 0,
        dashboard: Dashboard | None = None,
        context: ContextGroup = ALONE,
    ) -> None:
        """
        Args:
            folder: of the TensorBoard events; None on ranks that do not write.
            layout: what the rows of the plan are made of.
            start_step: optimizer steps that a resumed run starts from.
            context: the ranks that share each row.
        """
        self.records = RecordWriter(folder, start_step + 1 if start_step else None)
        self.run = RunResults(hardware, size)
        self.plan, self.layout = plan, layout
        self._counter = StepCounter(plan, layout, context)
        self.hardware, self.progress = hardware, progress
        self.dashboard = dashboard or Dashboard()
        self.evaluation_log = EvaluationLog(self.records, self.run, progress, resumed=start_step > 0)
        self.first_step_at: float | None = None
        self._supervised = 0  # tokens since the last record, of the first step too
        self.token_means: dict[str, float] = {}  # of the last record, by TRL's names, if its loss yields them
        self.diverged: str | None = None  # why the run was ended early, if it was
        self._window = Totals()
        self._seconds_recorded = (0.0, 0.0)  # of evaluation and saving, up to the last record
        self._rates: list[float] = []  # learning rate of each step since the last record
        self._training_since: float | None = None
        self.trackers: list[Tracker] = []
        self._devices: list[JsonObject] = []  # of each rank
        self._trainer: Any = None
        self._monitor: Monitor | None = None

    def attach(self, trainer: Any) -> None:
        """The trainer whose steps are timed. Its evaluation and its checkpoints are timed apart from them."""
        self._trainer = trainer
        self._callbacks = list(trainer.callback_handler.callbacks)
        # What the logger, its monitor and the timer of phases replace on a trainer and its accelerator.
        methods = ("evaluate", "_save_checkpoint", "get_batch_samples", "compute_loss", "average_gradients")
        replaced = [(trainer, name) for name in methods]
        replaced += [(trainer.accelerator, name) for name in ("backward", "clip_grad_norm_")]
        self._own = [(owner, name, vars(owner).get(name)) for owner, name in replaced]
        self._monitor = Monitor(
            trainer, self.plan, self.layout.tokens, self.layout.squared_lengths, self.hardware.device
        )
        trainer.evaluate = self._timed_apart("evaluation_seconds", trainer.evaluate)
        trainer._save_checkpoint = self._timed_apart("saving_seconds", trainer._save_checkpoint)

    def detach(self) -> None:
        """Give the trainer its own methods and callbacks back, as they were at `attach`."""
        for owner, name, own in self._own:
            vars(owner).pop(name, None)
            if own is not None:
                setattr(owner, name, own)
        self._trainer.callback_handler.callbacks[:] = self._callbacks

    @property
    def monitor(self) -> Monitor:
        """Of the trainer that this logger is attached to."""
        if self._monitor is None:
            raise ValueError("the logger is not attached to a trainer")
        return self._monitor

    def _timed_apart(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if self._training_since is None:
                return function(*args, **kwargs)
            if self.hardware.device == "cuda":
                torch.cuda.synchronize()  # the steps before it are not part of it
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                setattr(self.run, name, getattr(self.run, name) + time.perf_counter() - began)

        return call

    # --- training begins, a step ends ---------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._first_step = state.global_step + 1
        # A resumed run goes on counting where the checkpoint stopped.
        self.run.tokens_seen = self._counter.tokens_before(state.global_step)
        self._devices = distributed.gather_objects(_device_facts(self.hardware))
        if (events := self.records.events) is not None:
            events.add_custom_scalars(tensorboard_pages.layout())
            for name, text in self.dashboard.texts.items():
                events.add_text(name, text, state.global_step)
            events.add_histogram(tag("document_length"), self.layout.rows.lengths, state.global_step)
        self.records.start_line(state.global_step, int(args.logging_steps), self._devices)
        peak_memory.take_window()
        self.monitor.start(int(args.logging_steps))
        self._training_since = time.perf_counter()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._rates.append(float(self._trainer.optimizer.param_groups[0]["lr"]))  # a number: a tensor changes later
        step = state.global_step + 1
        if self._rates[-1] > 0 and (step % args.logging_steps == 0 or step >= state.max_steps):
            self.monitor.sample_weights()

    def on_optimizer_step(self, *_: object, **kwargs: object) -> None:
        self.monitor.compare_weights()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        state.epoch = state.global_step / self.plan.steps_per_epoch  # transformers counts a resumed epoch from zero
        step = self._counter.step(state.global_step - 1, args)
        self._window.add(step)
        self._supervised += step.supervised
        self.run.tokens_seen += step.tokens
        if state.global_step == self._first_step:
            # Compilation and allocation happen here; the rates start after it.
            if self.hardware.device == "cuda":
                torch.cuda.synchronize()
            self.first_step_at = time.time()
            self.run.start_up = startup.current().complete()
            self._window = Totals()
        self.monitor.step_ended(state.global_step, int(args.logging_steps))
        if state.global_step >= state.max_steps:
            control.should_log = True
        if self.progress:
            self.progress.step(state)

    # --- records ------------------------------------------------------------------------------------------------------

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict | None = None,
        **kwargs: object,
    ) -> None:
        """Log an evaluation, or a record: what all ranks did since the last one.

        transformers calls this for everything that anyone logs, so the keys say what it is. Every rank must get as far
        as `monitor.record`, which is a collective; only then may one differ from the others.
        """
        logs = logs or {}
        if "eval_answers" in logs:  # of `log_scores`; a metric of the user may be called anything
            return
        for name in evaluated_sets(logs):
            losses = self._trainer.eval_document_losses or []
            self.evaluation_log.metrics(logs, name, losses, state, shows=self._training_since is not None)
            step, loss = state.global_step, logs[f"eval_{name}_loss" if name else "eval_loss"]
            if step > 0 and not math.isfinite(loss):  # all ranks hold the same one
                raise RunError(f"The evaluation loss after step {step} is not finite ({loss}). {_LOWER_RATE}")
        if "loss" not in logs:
            return
        record = self.monitor.record()
        window, self._window = self._window, Totals()
        window.seconds = sum(record.step_seconds)  # of steps alone: evaluation and saving do not lower the throughput
        self.run.add(record, window)
        self.token_means = self._token_means(record)
        self.records.reported.clear()
        self._write_record(record, window, state.global_step, args.max_grad_norm)
        self._seconds_recorded = (self.run.evaluation_seconds, self.run.saving_seconds)
        if self.progress:
            norm = record.gradient_norms[-1] if record.gradient_norms else None
            loss = record.losses[-1] if record.losses else math.nan
            self.progress.log(state, loss, norm, self.run.throughput(window))
        if (wrong := wrong_bits.verdict(record.bits, state.global_step, self._devices)) is not None:
            raise RunError(wrong)  # all ranks hold the same record
        self._stop_if_diverged(record.losses, state.global_step, control)

    def _token_means(self, record: StepRecord) -> dict[str, float]:
        """Token accuracy, entropy and load-balancing loss of a record, by TRL's names."""
        counted, self._supervised = self._supervised, 0
        means = {}
        if counted and record.top1 is not None and record.entropy is not None:
            means = {"mean_token_accuracy": record.top1 / counted, "entropy": record.entropy / counted}
        if record.load_balancing is not None and record.losses:
            means["aux_loss"] = record.load_balancing / len(record.losses)
        return means

    def _write_record(self, record: StepRecord, window: Totals, step: int, max_grad_norm: float | None) -> None:
        rates, self._rates = self._rates, []
        clipped = self.run.clipped_share(record.gradient_norms, max_grad_norm)
        fullest = self.run.fullest_gpu(record)
        self.records.history("loss", record.losses, step)
        self.records.history("gradient_norm", record.gradient_norms, step)
        self.records.history("learning_rate", rates, step)
        evaluated, saved = self._seconds_recorded
        apart = self.run.evaluation_seconds + self.run.saving_seconds - sum(self._seconds_recorded)
        supervised = window.supervised or None
        values = {
            "token_accuracy": self.token_means.get("mean_token_accuracy"),
            "entropy": self.token_means.get("entropy"),
            "load_balancing_loss": self.token_means.get("aux_loss"),
            **metrics.expert_load_summary(record.expert_tokens),
            "clipped": clipped,
            "weights_unchanged": record.unchanged,
            "supervised_tokens": supervised / window.steps if supervised else None,
            "tokens_per_gpu": self.run.throughput(window),
            "tokens_total": metrics.rate(window.tokens, window.seconds),
            "rows_per_second": metrics.rate(window.rows, window.seconds),
            "mfu": self.run.mfu(window),
            "padding": window.padding,
            "evaluation_and_saving": apart,
            "tokens_seen": self.run.tokens_seen,
            "hours": (time.perf_counter() - (self._training_since or 0)) / 3600,
            "fullest": fullest,
            "allocator_retries": sum(rank.allocator_retries for rank in record.ranks),
        }
        self.records.scalars(values, step)
        if record.expert_tokens and self.records.events:
            self.records.events.add_histogram(tag("expert_load"), metrics.expert_loads(record.expert_tokens), step)
        self.records.ranks(record.ranks, step)
        evaluating, saving = self.run.evaluation_seconds - evaluated, self.run.saving_seconds - saved
        self.records.record_line(record, step, window.padding, evaluating, saving)

    def _stop_if_diverged(self, losses: list[float], step: int, control: TrainerControl) -> None:
        """All ranks hold the same losses, so all stop after the same step.

        Raises:
            RunError: one of the record's `losses` is not finite.
        """
        diverges = self.dashboard.divergence
        if diverges is not None and (why := diverges(self.run.losses, self.run.evaluations)) is not None:
            self.diverged = f"The run diverges at step {step}: {why}."
            control.should_save = control.should_training_stop = True
        for number, loss in enumerate(losses, start=step - len(losses) + 1):
            if not math.isfinite(loss):
                raise RunError(
                    f"The loss of step {number} is not finite ({loss}). Further training is pointless. {_LOWER_RATE}"
                )

    # --- evaluations --------------------------------------------------------------------------------------------------

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self._training_since is None:
            return
        if self.dashboard.samples is not None:  # inside the trainer's `evaluate`, so its time counts as evaluation
            result = self.dashboard.samples()
            self.log_scores(result, state)
            self.show_samples(result, state.global_step)
            if self.progress:
                for sample in result.shown[:1]:
                    self.progress.sample(*sample)

    def log_scores(self, result: SampleResult, state: TrainerState) -> None:
        """The scores of answers to held-out prompts: TensorBoard, the trainer's log, run.json, the terminal. Every rank
        calls it."""
        if self.evaluation_log.scores(result, state, shows=self._training_since is not None):
            scores = {**result.scores, "answers": len(result.answers)}
            self._trainer.log({f"eval_{name}": value for name, value in scores.items()})

    def show_samples(self, result: SampleResult, step: int) -> None:
        """The text page of answers, if rows may be shown."""
        if self.dashboard.include_rows:
            self.evaluation_log.samples(result, step)

    # --- the end ------------------------------------------------------------------------------------------------------

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self._training_since is not None:
            self.run.training_seconds += time.perf_counter() - self._training_since
            self._training_since = None
        self.monitor.close()
        if self.progress:
            self.progress.close()

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Leave the terminal as it was, write the last pages and close the TensorBoard file."""
        if self.progress:
            self.progress.close()
        if self._monitor is not None:
            self._monitor.close()
        if self.records.events:
            self.records.events.close()
        for tracker in self.trackers:
            tracker.end()

    def results(self) -> JsonObject:
        """Fields of run.json. Every rank calls it."""
        events = self.records.events
        return self.run.to_dict(self.monitor.exposed, [events.warning] if events and events.warning else [])


def _device_facts(hardware: Hardware) -> JsonObject:
    """Which machine and GPU this rank is on."""
    facts: JsonObject = {"host": socket.gethostname(), "device": hardware.name, "gpu": None, "uuid": None}
    if hardware.device == "cuda":
        index = torch.cuda.current_device()
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        facts |= {"gpu": index, "uuid": None if uuid is None else f"GPU-{uuid}"}
    return facts | {"memory_gib": hardware.memory_gib}
