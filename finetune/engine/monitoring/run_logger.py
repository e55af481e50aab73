"""Logs a run while it trains: TensorBoard, ranks.jsonl and lines of progress; and collects the figures of run.json."""

from __future__ import annotations

import math
import re
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import Progress, ProgressColumn, Task
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback, TrainerControl, TrainerState

from finetune.data.collate import MULTIPLE
from finetune.data.layout import Layout
from finetune.data.plan import Plan
from finetune.engine.monitoring import metrics, peak_memory, tensorboard_pages
from finetune.engine.monitoring.event_file import EventFile, RankLog
from finetune.engine.monitoring.metrics import ModelSize
from finetune.engine.monitoring.monitor import Monitor, RankRecord, StepRecord
from finetune.engine.monitoring.samples import Result
from finetune.engine.monitoring.trackers import Tracker
from finetune.errors import RunError
from finetune.runtime import startup
from finetune.runtime.command import printable
from finetune.runtime.machine.hardware import Hardware
from finetune.runtime.ranks import distributed
from finetune.runtime.tags import BY_NAME, PHASES, SHOWN_RANKS, tag

_LOWER_RATE = (
    "Lower training.learning_rate, set training.warmup_steps, or use model.dtype: bfloat16 instead of float16; then "
    "resume from the last checkpoint with training.resume_from_checkpoint: true."
)
_EVALUATION = re.compile(r"eval_((?P<set>.+)_)?loss")


@dataclass
class Totals:
    """Sums over the steps of a record, or of the run but for its first step, which compiles."""

    tokens: int = 0  # without padding
    squared_lengths: int = 0
    positions: int = 0  # computed, padding included
    supervised: int = 0
    rows: int = 0  # documents
    steps: int = 0
    seconds: float = 0.0  # of steps: evaluation and saving are not in it

    def add(self, other: Totals) -> None:
        """Element-wise sum."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def padding(self) -> float | None:
        """Share of the computed positions that hold no token, 0 to 1."""
        return 1 - self.tokens / self.positions if self.positions else None


@dataclass(kw_only=True)
class Dashboard:
    """What the logger cannot know by itself."""

    texts: dict[str, str] = field(default_factory=dict)  # Markdown pages by name, written when training begins
    first_hyperparameters: dict[str, float] = field(default_factory=dict)  # first columns of the HPARAMS table
    hyperparameters: dict[str, Any] = field(default_factory=dict)  # its other columns
    review: Callable[[], str] | None = None  # the review page as Markdown; reads what has been written so far
    divergence: Callable[[list[float]], str | None] | None = None  # a sentence if these losses of all steps diverge
    samples: Callable[[], Result] | None = None  # answers of the current model; called on every rank
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
    ) -> None:
        """
        Args:
            folder: of the TensorBoard events; None on ranks that do not write.
            layout: what the rows of the plan are made of.
            start_step: optimizer steps that a resumed run starts from.
        """
        purge = start_step + 1 if start_step else None
        self.writer = EventFile(folder, purge) if folder is not None else None
        self._rank_log = RankLog(folder.parent / "ranks.jsonl") if folder is not None else None
        self.plan, self.layout = plan, layout
        self.tokens, self.squared_lengths = layout.tokens, layout.squared_lengths
        self._documents = layout.packs.totals(np.ones(len(layout.rows), dtype=np.int64))
        self.hardware, self.size, self.progress = hardware, size, progress
        self.dashboard = dashboard or Dashboard()
        self.losses: list[float] = []
        self.step_seconds: list[float] = []
        self.evaluations: list[dict[str, Any]] = []
        self.evaluation_seconds = self.saving_seconds = self.training_seconds = 0.0
        self.tokens_seen = 0
        self.first_step_at: float | None = None
        self.start_up: dict[str, float] | None = None  # seconds by phase, if this is the first run of its process
        self.last: StepRecord | None = None
        self._supervised = 0  # tokens since the last record, of the first step too
        self.token_means: dict[str, float] = {}  # of the last record, by TRL's names, if its loss yields them
        self.diverged: str | None = None  # why the run was ended early, if it was
        self._start_step = start_step
        self._window, self._run = Totals(), Totals()
        self._apart = [0.0, 0.0]  # seconds of evaluation and saving at the last record
        self._rates: list[float] = []  # learning rate of each step since the last record
        self._norms = [0, 0]  # steps whose gradient norm is known, and those that were clipped
        self._retries = 0
        self._fullest: float | None = None
        self._training_since: float | None = None
        self.trackers: list[Tracker] = []
        self.reported: dict[str, float] = {}  # the figures of the last record or evaluation, as trackers show them
        self._scored_at = -1  # step of the last answers to held-out prompts
        self._evaluated_at: dict[str, int] = {}  # step of the last evaluation of each set
        self._trainer: Any = None
        self._monitor: Monitor | None = None

    def attach(self, trainer: Any) -> None:
        """The trainer whose steps are timed. Its evaluation and its checkpoints are timed apart from them."""
        self._trainer = trainer
        self._callbacks = list(trainer.callback_handler.callbacks)
        self._own = [(owner, name, vars(owner).get(name)) for owner, name in _wrapped(trainer)]
        self._monitor = Monitor(trainer, self.plan, self.tokens, self.squared_lengths, self.hardware.device)
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

    def _timed_apart(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._training_since is None:
                return function(*args, **kwargs)
            if self.hardware.device == "cuda":
                torch.cuda.synchronize()  # the steps before it are not part of it
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                setattr(self, name, getattr(self, name) + time.perf_counter() - began)

        return call

    # --- training begins, a step ends ---------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._first_step = state.global_step + 1
        # A resumed run goes on counting where the checkpoint stopped.
        epoch, step = divmod(state.global_step, self.plan.steps_per_epoch)
        self.tokens_seen = epoch * int(self.tokens.sum())
        self.tokens_seen += sum(int(self.tokens[self.plan.step_rows(epoch, k)].sum()) for k in range(step))
        here = distributed.gather_objects(_whereabouts(self.hardware))
        if self.writer and self._rank_log:
            self.writer.add_custom_scalars(tensorboard_pages.layout())
            for name, text in self.dashboard.texts.items():
                self.writer.add_text(name, text, state.global_step)
            columns = self.dashboard.first_hyperparameters, self.dashboard.hyperparameters
            for summary in tensorboard_pages.hyperparameters(*columns):
                self.writer.add_summary(summary, state.global_step)
            self.writer.add_histogram(tag("document_length"), self.layout.rows.lengths, state.global_step)
            ranks = [{"rank": rank, **facts} for rank, facts in enumerate(here)]
            start = {"kind": "start", "time": time.time(), "step": state.global_step, "world_size": len(ranks)}
            self._rank_log.append(start | {"logging_steps": int(args.logging_steps), "ranks": ranks})
        peak_memory.take_window()
        self.monitor.start(int(args.logging_steps))
        self._training_since = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # torchao's optimizers have it in a tensor, whose value changes later.
        self._rates.append(float(self._trainer.optimizer.param_groups[0]["lr"]))
        step = state.global_step + 1
        if self._rates[-1] > 0 and (step % args.logging_steps == 0 or step >= state.max_steps):
            self.monitor.sample_weights()

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.monitor.compare_weights()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        state.epoch = state.global_step / self.plan.steps_per_epoch  # transformers counts a resumed epoch from zero
        step = self._totals_of(state.global_step - 1, args)
        self._window.add(step)
        self._supervised += step.supervised
        self.tokens_seen += step.tokens
        if state.global_step == self._first_step:
            # Compilation and allocation happen here; the rates start after it.
            if self.hardware.device == "cuda":
                torch.cuda.synchronize()
            self.first_step_at = time.time()
            self.start_up = startup.current().complete()
            self._window = Totals()
        self.monitor.step_ended(state.global_step, int(args.logging_steps))
        if state.global_step >= state.max_steps:
            control.should_log = True
        if self.progress:
            self.progress.step(state)

    def _totals_of(self, step: int, args: Any) -> Totals:
        rows = self.plan.step_rows(*divmod(step, self.plan.steps_per_epoch))
        return Totals(
            tokens=int(self.tokens[rows].sum()),
            squared_lengths=int(self.squared_lengths[rows].sum()),
            positions=self._positions(step, args),
            supervised=int(self.layout.label_tokens[rows].sum()),
            rows=int(self._documents[rows].sum()),
            steps=1,
        )

    def _positions(self, step: int, args: Any) -> int:
        """Positions that all ranks compute in a step, padding included."""
        if self.layout.packs.pack_length is not None:
            return self.plan.global_batch_size * self.layout.packs.pack_length
        dealt = self.plan.deal(
            *divmod(step, self.plan.steps_per_epoch),
            world_size=args.world_size,
            per_device=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
        )
        lengths = self.layout.rows.lengths
        widths = (dealt >= 0) * lengths[dealt]
        widest = widths.max(axis=2).clip(1)
        return int((-(-widest // MULTIPLE) * MULTIPLE * dealt.shape[2]).sum())

    # --- records ------------------------------------------------------------------------------------------------------

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict | None = None, **kwargs: Any
    ) -> None:
        logs = logs or {}
        if "eval_answers" in logs:  # of `log_scores`; a metric of the user may be called anything
            return
        for key in logs:
            if (named := _EVALUATION.fullmatch(key)) is not None:
                self._log_evaluation(logs, named["set"] or "", state)
        if "loss" not in logs:
            return
        record = self.monitor.record()
        self.last = record
        self.losses += record.losses
        self.step_seconds += record.step_seconds
        window, self._window = self._window, Totals()
        window.seconds = sum(record.step_seconds)
        self._run.add(window)
        per_gpu = self._throughput(window)
        rates, self._rates = self._rates, []
        clipped = self._count_clipped(record.gradient_norms, args)
        fullest = self._fullest_gpu(record)
        retries = sum(rank.allocator_retries for rank in record.ranks)
        counted, self._supervised = self._supervised, 0
        supervised = window.supervised or None
        self.token_means = {}
        if counted and record.top1 is not None and record.entropy is not None:
            self.token_means = {"mean_token_accuracy": record.top1 / counted, "entropy": record.entropy / counted}
        if record.load_balancing is not None and record.losses:
            self.token_means["aux_loss"] = record.load_balancing / len(record.losses)
        self._retries += retries
        first = state.global_step - len(record.losses) + 1
        self.reported.clear()
        if self.writer:
            for name, values in (
                ("loss", record.losses),
                ("gradient_norm", record.gradient_norms),
                ("learning_rate", rates),
            ):
                for step, value in enumerate(values, start=state.global_step - len(values) + 1):
                    self._scalar(name, value, step)
            apart = self.evaluation_seconds + self.saving_seconds - sum(self._apart)
            values = {
                "token_accuracy": self.token_means.get("mean_token_accuracy"),
                "entropy": self.token_means.get("entropy"),
                "load_balancing_loss": self.token_means.get("aux_loss"),
                "clipped": clipped,
                "weights_unchanged": record.unchanged,
                "supervised_tokens": supervised / window.steps if supervised else None,
                "tokens_per_gpu": per_gpu,
                "tokens_total": metrics.rate(window.tokens, window.seconds),
                "rows_per_second": metrics.rate(window.rows, window.seconds),
                "mfu": self._mfu(window),
                "padding": window.padding,
                "evaluation_and_saving": apart,
                "tokens_seen": self.tokens_seen,
                "hours": (time.perf_counter() - (self._training_since or 0)) / 3600,
                "fullest": fullest,
                "allocator_retries": retries,
            }
            for name, value in values.items():
                self._scalar(name, value, state.global_step)
            self._log_ranks(record.ranks, state.global_step)
            self._append_to_rank_log(record, window, state)
        self._apart = [self.evaluation_seconds, self.saving_seconds]
        if self.progress:
            norm = record.gradient_norms[-1] if record.gradient_norms else None
            self.progress.log(state, record.losses[-1] if record.losses else math.nan, norm, per_gpu)
        # All ranks hold the same losses, so all stop after the same step.
        if self.dashboard.divergence is not None and (why := self.dashboard.divergence(self.losses)) is not None:
            self.diverged = f"The run diverges at step {state.global_step}: {why}."
            control.should_save = control.should_training_stop = True
        bad = [step for step, loss in enumerate(record.losses, start=first) if not math.isfinite(loss)]
        if bad:
            raise RunError(
                f"The loss of step {bad[0]} is not finite ({record.losses[bad[0] - first]}). Further training is "
                f"pointless. {_LOWER_RATE}"
            )

    def _log_ranks(self, ranks: list[RankRecord], step: int) -> None:
        """Phases as means over ranks, and the figures of each rank."""
        for name, field_name in (("step_seconds", "step"), *((phase, phase) for phase in PHASES)):
            values = [value for rank in ranks if (value := getattr(rank, field_name)) is not None]
            self._scalar(name, sum(values) / len(values) if values else None, step)
        own = [rank.own_work for rank in ranks if rank.own_work is not None]
        if len(own) == len(ranks) > 1:
            slowest, middle = max(own), median(own)
            self._scalar("own_work", middle, step)
            self._scalar("own_work_slowest", slowest, step)
            self._scalar("own_work_fastest", min(own), step)
            self._scalar("slowest_rank", own.index(slowest), step)
            longest = max(rank.step or 0.0 for rank in ranks)
            self._scalar("lost_to_slowest", (slowest - median(sorted(own)[:-1])) / longest if longest else None, step)
        for rank in ranks[:SHOWN_RANKS]:
            gpu = rank.gpu or {}
            each = {
                "own_work_of_rank": rank.own_work,
                "data_wait_of_rank": rank.data_wait,
                "peak_of_rank": rank.peak_gib,
                "reserved_of_rank": rank.reserved_gib,
                "gpu_utilization": gpu.get("utilization"),
                "gpu_clock": gpu.get("sm_clock_mhz"),
                "gpu_power": gpu.get("power_w"),
                "gpu_temperature": gpu.get("temperature_c"),
                "gpu_throttled": gpu.get("throttled"),
            }
            for name, value in each.items():
                self._scalar(name, value, step, rank.rank)

    def _append_to_rank_log(self, record: StepRecord, window: Totals, state: TrainerState) -> None:
        if self._rank_log is None or not record.step_seconds:
            return
        line = {
            "kind": "record",
            "time": time.time(),
            "step": state.global_step,
            "steps": len(record.step_seconds),
            "step_seconds": record.step_seconds,
            "evaluation_seconds": self.evaluation_seconds - self._apart[0],
            "saving_seconds": self.saving_seconds - self._apart[1],
            "padding": window.padding,
            "ranks": [asdict(rank) for rank in record.ranks],
        }
        self._rank_log.append(line)

    def _count_clipped(self, norms: list[float], args: Any) -> float | None:
        """Share of these steps that were clipped; None if nothing is clipped."""
        if not args.max_grad_norm or not norms:
            return None
        clipped = sum(norm > args.max_grad_norm for norm in norms)
        self._norms = [self._norms[0] + len(norms), self._norms[1] + clipped]
        return clipped / len(norms)

    def _fullest_gpu(self, record: StepRecord) -> float | None:
        reserved = [rank.reserved_gib for rank in record.ranks if rank.reserved_gib is not None]
        if not reserved or not self.hardware.memory_gib:
            return None
        fullest = max(reserved) / self.hardware.memory_gib
        self._fullest = max(fullest, self._fullest or 0.0)
        return fullest

    def _throughput(self, totals: Totals) -> float | None:
        return metrics.rate(totals.tokens / distributed.ranks().world_size, totals.seconds)

    def _mfu(self, totals: Totals) -> float | None:
        flops = metrics.training_flops(self.size, tokens=totals.tokens, squared_lengths=totals.squared_lengths)
        return metrics.mfu(flops, totals.seconds, distributed.ranks().world_size, self.hardware.peak_bf16_tflops)

    # --- evaluations --------------------------------------------------------------------------------------------------

    def _log_evaluation(self, logs: dict[str, float], name: str, state: TrainerState) -> None:
        """The metrics of the held-out rows, or of the set `name` of several."""
        step = state.global_step
        if step <= self._evaluated_at.get(name, -1) or (self._start_step and step == 0):
            return  # of the same weights: at the end of the run, or of the base model by the run that is resumed
        self._evaluated_at[name] = step
        prefix, shown = (f"eval_{name}", f" ({name})") if name else ("eval", "")
        loss, accuracy = logs[f"{prefix}_loss"], logs.get(f"{prefix}_token_accuracy")
        self.evaluations.append({"step": step, "loss": loss} | ({"set": name} if name else {}))
        self.reported.clear()
        values = {
            "eval_loss": loss,
            "eval_perplexity": math.exp(loss) if loss < 700 else math.inf,
            "eval_token_accuracy": accuracy,
            "eval_entropy": logs.get(f"{prefix}_entropy"),
        }
        for metric, value in values.items():
            if self.writer and value is not None:
                self.writer.add_scalar(tag(metric) + shown, float(value), step)
                self.reported[BY_NAME[metric].key.replace("eval", prefix, 1)] = float(value)
        losses = np.array(self._trainer.eval_document_losses or [])
        losses = losses[np.isfinite(losses)]
        if self.writer and losses.size:
            self.writer.add_histogram(tag("eval_document_loss") + shown, losses, step)
        if self.progress and self._training_since is not None:
            words = f"held-out loss{shown} {loss:.4f}, perplexity {values['eval_perplexity']:.4g}"
            self.progress.line(state, words if accuracy is None else f"{words}, token accuracy {accuracy:.1%}")
        if step > 0 and not math.isfinite(loss):  # all ranks hold the same loss
            raise RunError(f"The evaluation loss after step {step} is not finite ({loss}). {_LOWER_RATE}")

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._training_since is None:
            return
        if self.dashboard.samples is not None:  # inside the trainer's `evaluate`, so its time counts as evaluation
            result = self.dashboard.samples()
            self.log_scores(result, state)
            self.show_samples(result, state.global_step)
            if self.progress:
                for sample in result.shown[:1]:
                    self.progress.sample(*sample)
        self.write_review(state.global_step)

    def log_scores(self, result: Result, state: TrainerState) -> None:
        """The scores of answers to held-out prompts: TensorBoard, the trainer's log, run.json, the terminal. Every rank
        calls it."""
        step = state.global_step
        if step <= self._scored_at or (self._start_step and step == 0):
            return  # as in `_log_evaluation`
        self._scored_at = step
        match, own = result.scores["exact_match"], {k: v for k, v in result.scores.items() if k != "exact_match"}
        count = len(result.answers)
        self._scalar("eval_exact_match", match, step)
        self._scalar("eval_answers", count, step)
        if self.writer:
            for name, value in own.items():
                self.writer.add_scalar(tag("eval_metric", label=name), value, step)
        if self.evaluations and self.evaluations[-1]["step"] == step:
            self.evaluations[-1] |= {"answers": count, "scores": result.scores}
        self._trainer.log({f"eval_{name}": value for name, value in {**result.scores, "answers": count}.items()})
        if self.progress and self._training_since is not None:
            self.progress.line(state, f"held-out answers: {result.words}")

    def show_samples(self, result: Result, step: int) -> None:
        """The text page of answers, if rows may be shown."""
        if self.writer and self.dashboard.include_rows:
            self.writer.add_text("5 samples", tensorboard_pages.samples_page(result.shown, result.words), step)

    def show_best(self, text: str, step: int) -> None:
        """The text page of the best evaluation, if there is one."""
        if self.writer and text:
            self.writer.add_text("6 best evaluation", text, step)

    def write_review(self, step: int) -> None:
        """The review page and the picture of the last record's steps, as of now."""
        if self.writer is None:
            return
        if self.last is not None and any(rank.step for rank in self.last.ranks):
            self.writer.add_image("5 ranks/a typical step", tensorboard_pages.timeline(self.last.ranks), step)
        if self.dashboard.review is not None:
            self.writer.flush()
            self.writer.add_text("1 review", self.dashboard.review(), step)

    # --- the end ------------------------------------------------------------------------------------------------------

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._training_since is not None:
            self.training_seconds += time.perf_counter() - self._training_since
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
        if self.writer:
            if self.first_step_at is not None:
                self.write_review(self._trainer.state.global_step)
                self.writer.add_summary(tensorboard_pages.session_end(succeeded=kind is None), 0)
            self.writer.close()
        for tracker in self.trackers:
            tracker.end()

    def _scalar(self, name: str, value: float | None, step: int, n: int | None = None) -> None:
        if self.writer and value is not None:
            self.writer.add_scalar(tag(name, n), float(value), step)
            if BY_NAME[name].written == "record" and n is None:
                self.reported[BY_NAME[name].key] = float(value)

    def results(self) -> dict[str, Any]:
        """Fields of run.json. Rates and step times leave the first step out, which compiles."""
        measured = self._run if self._run.seconds else None
        known, clipped = self._norms
        return {
            "tokens": self.tokens_seen,
            "losses": self.losses,
            "evaluations": self.evaluations,
            "tokens_per_second_per_gpu": self._throughput(measured) if measured else None,
            "rows_per_second": metrics.rate(measured.rows, measured.seconds) if measured else None,
            "mfu": self._mfu(measured) if measured else None,
            "step_seconds_median": metrics.median(self.step_seconds),
            "padding_fraction": measured.padding if measured else None,
            "clipped_fraction": clipped / known if known else None,
            "training_seconds": self.training_seconds,
            "seconds_to_first_step": sum(self.start_up.values()) if self.start_up else None,
            "start_up": self.start_up,
            "evaluation_seconds": self.evaluation_seconds,
            "saving_seconds": self.saving_seconds,
            **self._communication(),
            "peak_memory_gib": distributed.gather_objects(peak_memory.peak_gib()),
            "memory_fraction": self._fullest,
            "allocator_retries": self._retries,
            "warnings": [self.writer.warning] if self.writer and self.writer.warning else [],
        }

    def _communication(self) -> dict[str, Any]:
        """The share (0 to 1) of a step in which gradients travel and nothing is computed: the median over the steps
        that DDP accounts for, averaged over ranks, by the median step. Waiting for a slower rank is in it."""
        if distributed.ranks().world_size == 1:
            return {"exposed_communication_fraction": 0.0, "exposed_communication_unknown": None}
        exposed = metrics.median(self.monitor.exposed)
        known = [one for one in distributed.gather_objects(exposed) if one is not None]
        step = metrics.median(self.step_seconds)
        if not known or not step:
            why = "DDP accounts for a step when the next one begins; the run was too short for that"
            return {"exposed_communication_fraction": None, "exposed_communication_unknown": why}
        share = sum(known) / len(known) / step
        return {"exposed_communication_fraction": share, "exposed_communication_unknown": None}


def _wrapped(trainer: Any) -> list[tuple[Any, str]]:
    """What the logger, its monitor and the timer of phases replace on a trainer and its accelerator."""
    methods = ("evaluate", "_save_checkpoint", "get_batch_samples", "compute_loss")
    return [(trainer, name) for name in methods] + [
        (trainer.accelerator, name) for name in ("backward", "clip_grad_norm_")
    ]


def _whereabouts(hardware: Hardware) -> dict[str, Any]:
    """Which machine and GPU this rank is on."""
    facts: dict[str, Any] = {"host": socket.gethostname(), "device": hardware.name, "gpu": None, "uuid": None}
    if hardware.device == "cuda":
        index = torch.cuda.current_device()
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        facts |= {"gpu": index, "uuid": None if uuid is None else f"GPU-{uuid}"}
    return facts | {"memory_gib": hardware.memory_gib}


class ProgressLines:
    """A progress bar on a terminal, one line per record elsewhere or if asked for. Both have the time so far and an
    estimate of the time left. For rank 0."""

    def __init__(self, console: Console, total: int, start_step: int = 0, *, lines: bool = False) -> None:
        """
        Args:
            total: optimizer steps of the whole run.
            start_step: those that an earlier run has done.
            lines: on a terminal, too, a line per record.
        """
        self.console = console
        self._bar: Progress | None = None
        self._total = total
        self._lines = lines or not console.is_terminal
        self._began = time.monotonic()
        self._first: tuple[int, float] | None = None  # the first step done here, which compiles, and when it ended
        self._done = start_step
        if console.is_terminal:
            self._bar = Progress(_Line(), console=console)
            self._task = self._bar.add_task("training", total=total, completed=start_step, times="", figures=())
            self._bar.start()

    def step(self, state: TrainerState) -> None:
        """One optimizer step is done."""
        self._done = state.global_step
        if self._first is None:
            self._first = state.global_step, time.monotonic()
        if self._bar:
            self._bar.update(self._task, completed=state.global_step, times=self.times())

    def times(self) -> str:
        """`elapsed 0:01:10, remaining 0:05:00`: evaluations and checkpoints so far are part of the pace. Without an
        estimate after the first step, which compiles."""
        now = time.monotonic()
        elapsed = f"elapsed {_clock(now - self._began)}"
        if self._first is None or self._done <= self._first[0]:
            return elapsed
        pace = (now - self._first[1]) / (self._done - self._first[0])
        return f"{elapsed}, remaining {_clock(pace * (self._total - self._done))}"

    def log(self, state: TrainerState, loss: float, grad_norm: float | None, per_gpu: float | None) -> None:
        """Show the figures of a record."""
        parts = [f"loss {loss:.4f}"]
        if grad_norm is not None:
            parts.append(f"gradient norm {grad_norm:.3f}")
        if per_gpu is not None:
            parts.append(f"{per_gpu:,.0f} tokens/s per device")
        if self._bar:
            short = [parts[0]] if per_gpu is None else [parts[0], f"{per_gpu:,.0f} tok/s"]
            self._bar.update(self._task, figures=(", ".join(parts), ", ".join(short), parts[0]))
        if self._lines:
            self.line(state, f"{', '.join(parts)}, {self.times()}")

    def line(self, state: TrainerState, text: str) -> None:
        """A line of its own, above the bar if there is one."""
        self._print(f"step {state.global_step}/{self._total}: {text}")

    def sample(self, prompt: str, answer: str, reference: str) -> None:
        """An answer of the current model, on one line each for answer and reference."""
        self._print(f"  {_one_line(prompt, 60)} -> {_one_line(answer, 120)}")
        self._print(f"  expected: {_one_line(reference, 120)}")

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar:
            self._bar.stop()
            self._bar = None


class _Line(ProgressColumn):
    """The line of a progress bar in whatever width there is. The step count is the last thing to drop: first the
    figures become shorter, then the bar, the time so far and the figures go."""

    max_refresh = None

    def render(self, task: Task) -> _Fitted:
        return _Fitted(task)


class _Fitted:
    """A task's line, as much of it as fits."""

    BAR, SHORTEST_BAR = 40, 10

    def __init__(self, task: Task) -> None:
        figures = task.fields["figures"] or (task.description,)
        times = task.fields["times"]
        left = times[max(times.find("remaining"), 0) :]
        steps = f"{int(task.completed)}/{int(task.total or 0)}"
        self._task = task
        # (what stands before the bar, what follows it), from the longest to the shortest
        self._forms = [
            *((one, f"{steps} {times}".rstrip()) for one in figures),
            *((one, f"{steps} {left}".rstrip()) for one in figures),
            (figures[-1], steps),
            ("", steps),
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        for before, after in self._forms:
            room = width - len(before) - len(after) - 2 * bool(before)
            if room >= self.SHORTEST_BAR:
                grid = Table.grid(padding=(0, 1))
                bar = ProgressBar(total=self._task.total, completed=self._task.completed, width=min(room, self.BAR))
                grid.add_row(*([Text(before)] if before else []), bar, Text(after))
                yield grid
                return
        for before, after in self._forms:
            line = f"{before} {after}".strip()
            if len(line) <= width:
                yield Text(line)
                return
        yield Text(self._forms[-1][1], overflow="crop", no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(len(self._forms[-1][1]), options.max_width), options.max_width)


_LONGEST = 86_400 * 999_999_999  # seconds of a timedelta


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:03."""
    return str(timedelta(seconds=round(min(seconds, _LONGEST))))


def _one_line(text: str, longest: int) -> str:
    shown = printable(" ".join(text.split()))
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."
