"""What run.json records of the training: sums over the whole run, collected from its records."""

from __future__ import annotations

from finetune.engine.monitoring import metrics, peak_memory
from finetune.engine.monitoring.metrics import ModelSize
from finetune.engine.monitoring.monitor import StepRecord
from finetune.engine.monitoring.records import Totals
from finetune.runtime.machine.hardware import Hardware
from finetune.runtime.ranks import distributed
from finetune.runtime.types import JsonObject


class RunResults:
    """Figures of the run so far. Rates and step times leave the first step out, which compiles."""

    def __init__(self, hardware: Hardware, size: ModelSize) -> None:
        self._hardware, self._size = hardware, size
        self.losses: list[float] = []  # of each step
        self.step_seconds: list[float] = []
        self.evaluations: list[JsonObject] = []
        self.evaluation_seconds = self.saving_seconds = self.training_seconds = 0.0
        self.tokens_seen = 0
        self.start_up: dict[str, float] | None = None  # seconds by phase, if this is the first run of its process
        self._totals = Totals()
        self._norms_known = self._norms_clipped = 0  # steps whose gradient norm is known, and those that were clipped
        self._retries = 0
        self._fullest: float | None = None

    def add(self, record: StepRecord, window: Totals) -> None:
        """A record is complete.

        Args:
            window: the totals of its steps.
        """
        self.losses += record.losses
        self.step_seconds += record.step_seconds
        self._totals.add(window)
        self._retries += sum(rank.allocator_retries for rank in record.ranks)

    def throughput(self, totals: Totals) -> float | None:
        """Tokens per second and rank."""
        return metrics.rate(totals.tokens / distributed.ranks().world_size, totals.seconds)

    def mfu(self, totals: Totals) -> float | None:
        """Model FLOPs utilization, 0 to 1; None if the GPU's peak is not known."""
        flops = metrics.training_flops(self._size, tokens=totals.tokens, squared_lengths=totals.squared_lengths)
        return metrics.mfu(flops, totals.seconds, distributed.ranks().world_size, self._hardware.peak_bf16_tflops)

    def clipped_share(self, norms: list[float], largest: float | None) -> float | None:
        """Share of these steps whose gradients were clipped; None if nothing is clipped.

        Args:
            norms: of the gradients of each step, before clipping.
            largest: norm that gradients are clipped to, if they are.
        """
        if not largest or not norms:
            return None
        clipped = sum(norm > largest for norm in norms)
        self._norms_known += len(norms)
        self._norms_clipped += clipped
        return clipped / len(norms)

    def fullest_gpu(self, record: StepRecord) -> float | None:
        """Share of its memory that the fullest GPU has reserved; None if it is not known."""
        reserved = [rank.reserved_gib for rank in record.ranks if rank.reserved_gib is not None]
        if not reserved or not self._hardware.memory_gib:
            return None
        fullest = max(reserved) / self._hardware.memory_gib
        self._fullest = max(fullest, self._fullest or 0.0)
        return fullest

    def to_dict(self, exposed: list[float], warnings: list[str]) -> JsonObject:
        """Fields of run.json. Every rank calls it.

        Args:
            exposed: seconds of exposed communication in each step that DDP measured on this rank.
        """
        measured = self._totals if self._totals.seconds else None
        return {
            "tokens": self.tokens_seen,
            "losses": self.losses,
            "evaluations": self.evaluations,
            "tokens_per_second_per_gpu": self.throughput(measured) if measured else None,
            "rows_per_second": metrics.rate(measured.rows, measured.seconds) if measured else None,
            "mfu": self.mfu(measured) if measured else None,
            "step_seconds_median": metrics.median(self.step_seconds),
            "padding_fraction": measured.padding if measured else None,
            "clipped_fraction": self._norms_clipped / self._norms_known if self._norms_known else None,
            "training_seconds": self.training_seconds,
            "seconds_to_first_step": sum(self.start_up.values()) if self.start_up else None,
            "start_up": self.start_up,
            "evaluation_seconds": self.evaluation_seconds,
            "saving_seconds": self.saving_seconds,
            **self._communication(exposed),
            "peak_memory_gib": distributed.gather_objects(peak_memory.peak_gib()),
            "memory_fraction": self._fullest,
            "allocator_retries": self._retries,
            "warnings": warnings,
        }

    def _communication(self, exposed: list[float]) -> JsonObject:
        """The share (0 to 1) of a step in which gradients travel and nothing is computed: the median over the steps
        that DDP accounts for, averaged over ranks, by the median step. Waiting for a slower rank is in it."""
        if distributed.ranks().world_size == 1:
            return {"exposed_communication_fraction": 0.0, "exposed_communication_unknown": None}
        known = [one for one in distributed.gather_objects(metrics.median(exposed)) if one is not None]
        step = metrics.median(self.step_seconds)
        if not known or not step:
            why = "DDP accounts for a step when the next one begins; the run was too short for that"
            return {"exposed_communication_fraction": None, "exposed_communication_unknown": why}
        share = sum(known) / len(known) / step
        return {"exposed_communication_fraction": share, "exposed_communication_unknown": None}
