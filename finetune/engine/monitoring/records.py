"""The figures of a record, written to TensorBoard and ranks.jsonl."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
from transformers import TrainingArguments

from finetune.data.layout import Layout
from finetune.data.plan import Plan
from finetune.engine.monitoring.event_file import EventFile, RankLog
from finetune.engine.monitoring.monitor import RankRecord, StepRecord
from finetune.runtime.ranks.context_group import ALONE, ContextGroup
from finetune.runtime.tags import BY_NAME, PHASES, SHOWN_RANKS, tag


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


class StepCounter:
    """What the plan puts into each optimizer step, over all ranks."""

    def __init__(self, plan: Plan, layout: Layout, context: ContextGroup = ALONE) -> None:
        """
        Args:
            context: the ranks that share each row.
        """
        self._plan, self._layout, self._context = plan, layout, context
        self._documents = layout.packs.totals(np.ones(len(layout.rows), dtype=np.int64))

    def step(self, step: int, args: TrainingArguments) -> Totals:
        """The totals of optimizer step `step`, counted from 0, without its seconds."""
        layout, place = self._layout, divmod(step, self._plan.steps_per_epoch)
        rows = self._plan.step_rows(*place)
        dealt = self._plan.deal(
            *place,
            world_size=args.world_size // self._context.processes,
            per_device=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
        )
        return Totals(
            tokens=int(layout.tokens[rows].sum()),
            squared_lengths=int(layout.squared_lengths[rows].sum()),
            positions=int(layout.micro_batch_tokens(dealt, self._context.size).sum()),
            supervised=int(layout.label_tokens[rows].sum()),
            rows=int(self._documents[rows].sum()),
            steps=1,
        )

    def tokens_before(self, step: int) -> int:
        """Tokens in the steps before `step`, without padding."""
        epoch, steps = divmod(step, self._plan.steps_per_epoch)
        tokens = self._layout.tokens
        return epoch * int(tokens.sum()) + sum(
            int(tokens[self._plan.step_rows(epoch, one)].sum()) for one in range(steps)
        )


class RecordWriter:
    """Writes TensorBoard's event file and ranks.jsonl; on a rank without a folder it writes nothing."""

    def __init__(self, folder: Path | None, purge_step: int | None) -> None:
        """
        Args:
            folder: of the TensorBoard events; None on ranks that do not write.
            purge_step: as `EventFile`'s.
        """
        self.events = EventFile(folder, purge_step) if folder is not None else None
        self._rank_log = RankLog(folder.parent / "ranks.jsonl") if folder is not None else None
        self.reported: dict[str, float] = {}  # the figures of the last record or evaluation, by their trackers' keys

    def scalar(self, name: str, value: float | None, step: int, rank: int | None = None) -> None:
        """A figure by its name in `tags`; of one rank if that is given. None is not written."""
        if self.events and value is not None:
            self.events.add_scalar(tag(name, rank), float(value), step)
            if BY_NAME[name].written == "record" and rank is None:
                self.reported[BY_NAME[name].key] = float(value)

    def scalars(self, values: Mapping[str, float | None], step: int) -> None:
        """Several figures of one step."""
        for name, value in values.items():
            self.scalar(name, value, step)

    def history(self, name: str, values: Sequence[float], last_step: int) -> None:
        """A figure of each of several steps, the last of which is `last_step`."""
        for step, value in enumerate(values, start=last_step - len(values) + 1):
            self.scalar(name, value, step)

    def evaluation(self, name: str, value: float, step: int, prefix: str, label: str) -> None:
        """A figure of held-out rows.

        Args:
            prefix: of its key in trackers: "eval", or "eval_NAME" for a set.
            label: what follows the tag: " (NAME)" for a set.
        """
        if self.events:
            self.events.add_scalar(tag(name) + label, value, step)
            self.reported[BY_NAME[name].key.replace("eval", prefix, 1)] = value

    def ranks(self, ranks: Sequence[RankRecord], step: int) -> None:
        """Phases as means over ranks, and the figures of each rank."""
        for name, field_name in (("step_seconds", "step"), *((phase, phase) for phase in PHASES)):
            values = [value for rank in ranks if (value := getattr(rank, field_name)) is not None]
            self.scalar(name, sum(values) / len(values) if values else None, step)
        own = [rank.own_work for rank in ranks if rank.own_work is not None]
        if len(own) == len(ranks) > 1:
            slowest, middle = max(own), median(own)
            self.scalar("own_work", middle, step)
            self.scalar("own_work_slowest", slowest, step)
            self.scalar("own_work_fastest", min(own), step)
            self.scalar("slowest_rank", own.index(slowest), step)
            longest = max(rank.step or 0.0 for rank in ranks)
            self.scalar("lost_to_slowest", (slowest - median(sorted(own)[:-1])) / longest if longest else None, step)
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
                self.scalar(name, value, step, rank.rank)

    def start_line(self, step: int, logging_steps: int, devices: Sequence[Mapping[str, object]]) -> None:
        """The line of ranks.jsonl at the start of training; `devices` has the machine and GPU of each rank."""
        if self._rank_log is not None:
            ranks = [{"rank": rank, **facts} for rank, facts in enumerate(devices)]
            line = {"kind": "start", "time": time.time(), "step": step, "world_size": len(ranks)}
            self._rank_log.append(line | {"logging_steps": logging_steps, "ranks": ranks})

    def record_line(
        self, record: StepRecord, step: int, padding: float | None, evaluating: float, saving: float
    ) -> None:
        """The line of ranks.jsonl for a record.

        Args:
            evaluating, saving: seconds since the last record.
        """
        if self._rank_log is None or not record.step_seconds:
            return
        line = {
            "kind": "record",
            "time": time.time(),
            "step": step,
            "steps": len(record.step_seconds),
            "step_seconds": record.step_seconds,
            "evaluation_seconds": evaluating,
            "saving_seconds": saving,
            "padding": padding,
            "ranks": [asdict(rank) for rank in record.ranks],
        }
        self._rank_log.append(line)
