"""What a dry run finds out about ways to keep activations: the longest row that fits with each, and whether that of the
job holds its longest row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from finetune.config.rules import Mode
from finetune.engine.session.choice import Choice
from finetune.engine.session.report import activations_line
from finetune.errors import RunError
from finetune.measure import activations, longest_row, micro_batch, slices
from finetune.measure.activations import Measured, Rows
from finetune.measure.rules import MEMORY_MARGIN
from finetune.measure.trial import Trial
from finetune.runtime.command import console
from finetune.runtime.types import JsonObject
from finetune.text import counted


class DoesNotFit(RunError):
    """The longest row does not fit the device, which is known without trying it."""


@dataclass(kw_only=True)
class TrialModes:
    """The modes of a trial.

    rows:    of the job, of which the trial has a sample
    choice:  how the job keeps its activations; measured first if it `searches`
    every:   measure all modes, not only that one
    seconds: that the measurement before the first step took, without what a run needs as well
    """

    trial: Trial
    rows: Rows
    choice: Choice[Mode]
    every: bool = False
    found: list[Measured] = field(default_factory=list)
    proof: JsonObject | None = None
    seconds: float = 0.0

    def measure(self) -> None:
        """Before the first step: measure, and take the fastest mode if the job leaves it open.

        Raises:
            DoesNotFit: the longest row is predicted not to fit.
        """
        trial, limit = self.trial, self.trial.memory.limit_bytes
        if limit is None:
            return
        began = time.perf_counter()
        job = trial.job
        every = self.every or self.choice.searches or slices.is_slice()
        self._measure(longest_row.ladder(job) if every else [self.choice.value])
        if self.choice.searches:
            try:
                self.choice = longest_row.decide(self.rows, self.found, limit)
            except RunError as error:
                raise DoesNotFit(str(error)) from None
            job.config = self.choice.value.set_in(job.config)
        longest_row.apply(trial.trainer, self.choice.value)
        own = self.of(self.choice.value)
        points = own.points if own is not None else ()
        compiling = sum((one.first_seconds or one.seconds) - one.seconds for one in points)  # as a run will, too
        elapsed = time.perf_counter() - began
        self.seconds = elapsed - max(compiling, 0.0)
        trial.budget.postpone(elapsed)
        # A line through one point may be too high, and without any the trial finds out what fills the device.
        if own is not None and len(own.points) == 2 and not longest_row.fits_without_margin(own, self.rows, limit):
            raise DoesNotFit(self._fewer_rows(own, limit) or self.remedy())

    def _measure(self, modes: Sequence[Mode]) -> None:
        trial = self.trial
        missing = [mode for mode in modes if self.of(mode) is None]
        self.found += longest_row.measure(
            trial.trainer, trial.job.layout, trial.job.size, missing, trial.memory, lambda: trial.budget.over
        )
        if len(modes) > 1 and not trial.budget.over:
            longest_row.save(trial.job, self.found)
        trial.memory.reset()

    def of(self, mode: Mode) -> Measured | None:
        """The measurement of a mode."""
        return next((one for one in self.found if one.mode == mode), None)

    def may_fit(self, per_device: int) -> bool:
        """Whether a micro-batch of so many rows may fit, by the line of the job's mode."""
        own, limit = self.of(self.choice.value), self.trial.memory.limit_bytes
        if own is None or own.line is None or limit is None:
            return True
        tokens = self.rows.most / self.trial.job.batch.per_device * per_device
        return own.line.peak_bytes(tokens) <= limit / MEMORY_MARGIN

    def _fewer_rows(self, own: Measured, limit: float) -> str | None:
        """Why the micro-batch does not fit, and the largest that is predicted to; None if not even one row is."""
        job, rows = self.trial.job, self.trial.job.batch.per_device
        sizes = [size for size in micro_batch.allowed_sizes(job, 1) if size < rows]
        fitting = [size for size in sizes if own.fits(-(-self.rows.most * size // rows), limit)]
        if not fitting:
            return None
        return (
            f"A micro-batch of {counted(rows, 'row')} ({self.rows.most:,} tokens) does not fit. The largest "
            f"that is predicted to fit has {counted(max(fitting), 'row')}: set training.per_device_train_batch_size to "
            f"{max(fitting)} (same global batch, same result)."
        )

    def remedy(self) -> str:
        """Why the longest micro-batch does not fit, and the settings that hold it, proven by a pass on it."""
        trial, limit = self.trial, self.trial.memory.limit_bytes
        assert limit is not None
        self._measure(longest_row.ladder(trial.job))
        left = list(self.found)
        while (chosen := activations.fastest(left, self.rows, limit)) is not None and not self._prove(chosen):
            left.remove(chosen)
        return longest_row.refusal(left, self.rows, limit, proven=chosen is not None)

    def _prove(self, one: Measured) -> bool:
        """Whether a pass on the longest micro-batch stays below the limit."""
        trial, limit = self.trial, self.trial.memory.limit_bytes
        assert limit is not None
        longest_row.apply(trial.trainer, one.mode)
        with console().status(f"a pass on the longest row with {one.mode.text}"):
            peak = longest_row.try_longest(trial.trainer, trial.job, trial.memory)
        if peak is None:
            return False
        self.note_proof(one, peak)
        return peak <= limit

    def note_proof(self, one: Measured, peak_bytes: float) -> None:
        """Compare the prediction with a real pass on the longest micro-batch."""
        predicted = None if one.line is None else one.line.peak_bytes(self.rows.most)
        self.proof = {
            "mode": vars(one.mode),
            "tokens": self.rows.most,
            "predicted_peak_bytes": predicted,
            "measured_peak_bytes": peak_bytes,
            "error": None if predicted is None else predicted / peak_bytes - 1,
        }

    def to_dict(self) -> JsonObject | None:
        """For the report; None on a device without a limit."""
        limit = self.trial.memory.limit_bytes
        if limit is None or not self.found:
            return None
        order = longest_row.ladder(self.trial.job)
        found = sorted(self.found, key=lambda one: order.index(one.mode) if one.mode in order else -1)
        own = {
            "own": self.choice.to_dict(vars(self.choice.value)),
            "line": activations_line(self.choice),
            "proof": self.proof,
        }
        return activations.to_dict(found, self.rows, limit) | own

    def fits_with(self) -> list[str] | None:
        """Arguments with which the longest micro-batch was proven to fit."""
        limit = self.trial.memory.limit_bytes
        if self.proof is None or limit is None or self.proof["measured_peak_bytes"] > limit:
            return None
        return Mode(**self.proof["mode"]).flags()
