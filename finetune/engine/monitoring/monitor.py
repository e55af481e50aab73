"""What each rank did since the last record: phases of its steps, losses, norms, memory; exchanged in one collective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
import torch

from finetune.data.plan import Plan
from finetune.engine.monitoring import peak_memory, wrong_bits
from finetune.engine.monitoring.phases import PhaseTimer
from finetune.engine.optimizer import master_weights
from finetune.runtime.machine import nvml
from finetune.runtime.ranks import distributed
from finetune.runtime.tags import PHASES
from finetune.runtime.types import JsonObject

# What a rank sends besides its losses, in this order; NaN for what it does not know.
FIELDS = (
    *("step", *PHASES, "own_work", "wait", "peak_gib", "reserved_gib", "allocator_retries"),
    *("top1", "entropy", "load_balancing", "unchanged", "compared", *wrong_bits.FIELDS),
)
DDP_FIRST_STEPS = 10  # DDP measures its first ten steps whatever the sample rate


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """One rank's part of a record. Seconds are those of a typical step; None for what is not known."""

    rank: int
    step: float | None
    data_wait: float | None
    forward: float | None  # both without exposed communication
    backward: float | None
    communication: float | None  # exposed
    optimizer: float | None
    other: float | None
    own_work: float | None  # a step without its exposed communication
    wait: float | None  # that the host waited for the GPU at this record: how far it was ahead
    peak_gib: float | None
    reserved_gib: float | None
    allocator_retries: int
    tokens: int  # of the record's steps together, without padding
    squared_lengths: int
    gpu: JsonObject | None  # by nvml.FIELDS


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """All ranks since the last record."""

    losses: list[float]  # of each step, in nats per supervised token
    gradient_norms: list[float]  # of each step, before clipping
    step_seconds: list[float]  # of each step of this rank; the first step of a run, which compiles, is left out
    ranks: list[RankRecord]
    top1: float | None  # supervised tokens whose label had the highest probability, over all ranks
    entropy: float | None  # summed over supervised tokens of all ranks, in nats
    load_balancing: float | None  # loss of a mixture of experts without its coefficient, summed over steps
    expert_tokens: list[np.ndarray]  # float64 [experts] of each layer that has several: the tokens of each expert
    unchanged: float | None  # share of the sampled trained weights that the last optimizer step left as they were
    bits: list[list[float]]  # of each rank, for `wrong_bits.verdict`


class Monitor:
    """Collects what one rank does, and exchanges it with the others when a record is due.

    Nothing here synchronizes host and device except `record`.
    """

    def __init__(self, trainer: Any, plan: Plan, tokens: np.ndarray, squared_lengths: np.ndarray, device: str) -> None:
        """
        Args:
            tokens, squared_lengths: of each row of the plan, int64 [n_rows].
            device: "cuda" or "cpu".
        """
        self._trainer, self._plan = trainer, plan
        self._tokens, self._squares = tokens, squared_lengths
        self._timer = PhaseTimer(trainer, device)
        self._norms: list[torch.Tensor | float] = []
        self._sample: master_weights.WeightSample | None = None
        self._unchanged: torch.Tensor | None = None
        self._steps = 0  # of this process
        self._shares = np.zeros((2, distributed.ranks().world_size), dtype=np.int64)  # tokens and squares by rank
        self._accounts: list[tuple[int, float]] = []  # (step of this process, exposed seconds), to be used
        self._account: tuple[float, float] | None = None  # DDP's last report
        self._last_totals: dict[int, float] = {}
        self._exposed_share: float | None = 0.0 if distributed.ranks().world_size == 1 else None
        self._exposed: list[float] = []  # seconds of each step that DDP measured
        self._exchange_steps: list[int] = []  # steps of this process whose exchanges of shared rows were timed
        self._exchange_shares = (0.0, 0.0)  # of a step, in its forward and backward passes
        self._exchange_seconds = 0.0  # of a step
        self._kept: list[dict[str, list[float]]] | None = None
        self._sampler: nvml.GpuSampler | None = None
        self._most_here = distributed.ranks().local_world_size  # ranks of the machine that has the most
        self._bits = trainer.wrong_bits = wrong_bits.WrongBits(trainer)
        _note_norms(trainer.accelerator, self._norms)

    def keep_steps(self) -> None:
        """Keep the phases of every step, for `steps`."""
        self._kept = []

    @property
    def steps(self) -> list[dict[str, list[float]]]:
        """Seconds by phase of every step so far (see `phases.split_steps`). Synchronizes with the device.

        Raises:
            ValueError: `keep_steps` was not called.
        """
        if self._kept is None:
            raise ValueError("steps are kept after keep_steps() only")
        self._kept += self._timer.take()
        return self._kept

    @property
    def exposed(self) -> list[float]:
        """Seconds of exposed communication in each step that DDP measured, with the exchanges of shared rows, which no
        computation hides."""
        return [seconds + self._exchange_seconds for seconds in self._exposed]

    def start(self, logging_steps: int) -> None:
        """Training begins: have DDP measure its communication in one step of each record."""
        model = self._trainer.model_wrapped
        if hasattr(model, "_set_ddp_runtime_logging_sample_rate"):
            model._set_ddp_runtime_logging_sample_rate(logging_steps)
        me = distributed.ranks()
        self._most_here = max(distributed.gather_objects(me.local_world_size))
        if me.is_local_main:
            self._sampler = nvml.start_sampling(me.local_world_size)

    def close(self) -> None:
        """Stop sampling GPUs."""
        if self._sampler is not None:
            self._sampler.close()

    def step_ended(self, global_step: int, logging_steps: int) -> None:
        """Count the rows of the optimizer step that has just ended, and read what DDP measured of the one before.

        Args:
            global_step: steps complete, this one included.
        """
        self._steps += 1
        args, context = self._trainer.args, self._trainer.context
        dealt = self._plan.deal(
            *divmod(global_step - 1, self._plan.steps_per_epoch),
            world_size=context.data_ranks,
            per_device=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
        )
        for place, values in enumerate((self._tokens, self._squares)):
            by_rows = np.where(dealt >= 0, values[dealt], 0).sum(axis=(0, 2))
            # Ranks that share rows have equal parts; the first ones the rest.
            shared = context.processes
            self._shares[place] += ((by_rows[:, None] + np.arange(shared)[::-1]) // shared).ravel()
        # A reduction in the first of several micro-batches shifts DDP's count of iterations by one.
        if self._steps > 2 and (self._steps <= DDP_FIRST_STEPS + 1 or self._steps % logging_steps <= 1):
            found = exposed_and_hidden(self._trainer.model_wrapped)
            if found is not None and found != self._account:
                self._accounts.append((self._steps - 1, found[0]))
                self._exposed.append(found[0])
            self._account = found
        if (timer := context.timer) is not None:
            if timer.on:
                self._exchange_steps.append(self._steps)
            timer.on = self._steps < DDP_FIRST_STEPS or (global_step + 1) % logging_steps == 0

    def record(self) -> StepRecord:
        """What all ranks did since the last call. The one host-device sync and the one collective of a record."""
        steps, waited = self._timer.take(), self._timer.host_lead
        if self._kept is not None:
            self._kept += steps
        losses = self._trainer.statistics.take_losses()
        first = self._steps - len(steps) + 1
        if first == 1:
            steps, first = steps[1:], 2
        totals = [sum(map(sum, step.values())) for step in steps]
        window = peak_memory.take_window()
        own = (
            self._own_fields(steps, totals, first)
            | self._statistics()
            | {
                "wait": waited,
                "peak_gib": window.peak_gib,
                "reserved_gib": math.nan if window.reserved_gib is None else window.reserved_gib,
                "allocator_retries": float(window.allocator_retries),
                **dict(zip(wrong_bits.FIELDS, self._bits.fields(), strict=True)),
            }
        )
        norms = [float(norm) for norm in self._norms]
        self._norms.clear()
        counts = self._trainer.statistics.take_expert_counts()
        vectors = distributed.gather_floats([*losses, *counts, *(own[name] for name in FIELDS), *self._gpu_block()])
        before = len(losses) + len(counts)
        fields: list[dict[str, float]] = [dict(zip(FIELDS, vector[before:], strict=False)) for vector in vectors]
        gpus = gpus_by_rank([vector[before + len(FIELDS) :] for vector in vectors])
        unchanged, compared = (_known_sum(fields, name) for name in ("unchanged", "compared"))
        load = self._trainer.statistics.expert_load
        summed = np.sum([vector[len(losses) : before] for vector in vectors], axis=0)
        layers = [] if load is None else np.split(summed, np.cumsum(load.sizes)[:-1])
        shares, self._shares = self._shares, np.zeros_like(self._shares)
        return StepRecord(
            losses=[sum(vector[step] for vector in vectors) / len(vectors) for step in range(len(losses))],
            gradient_norms=norms,
            step_seconds=totals,
            ranks=[
                _rank_record(rank, one, tokens, squares, gpus.get(rank))
                for rank, (one, tokens, squares) in enumerate(zip(fields, *shares.tolist(), strict=True))
            ],
            top1=_known_sum(fields, "top1"),
            entropy=_known_sum(fields, "entropy"),
            load_balancing=_known_sum(fields, "load_balancing"),
            expert_tokens=[one for one in layers if one.any()],  # others' experts tell nothing of their choice
            unchanged=(unchanged or 0) / compared if compared else None,
            bits=[[one[name] for name in wrong_bits.FIELDS] for one in fields],
        )

    def sample_weights(self) -> None:
        """Before an optimizer step whose record is due: keep a sample of the trained weights."""
        self._sample = master_weights.WeightSample(self._trainer.model.parameters())

    def compare_weights(self) -> None:
        """After the step: count the weights of the sample that it left unchanged."""
        if self._sample is not None:
            self._unchanged, self._sample = self._sample.unchanged(), None

    def _own_fields(self, steps: list[dict[str, list[float]]], totals: list[float], first: int) -> dict[str, float]:
        by_step = self._last_totals | dict(enumerate(totals, start=first))
        accounted = [(by_step[step], exposed) for step, exposed in self._accounts if step in by_step]
        self._accounts.clear()
        self._last_totals = dict(list(by_step.items())[-1:])
        if self._trainer.graphs is not None and distributed.ranks().world_size > 1:  # nothing hides that reduction
            accounted = [(total, step["backward"][-1]) for step, total in zip(steps, totals, strict=True)]
            self._exposed += [exposed for _, exposed in accounted]
        if accounted:  # as a share: the step that DDP measured may take longer than the typical one
            self._exposed_share = median(exposed / total if total else 0.0 for total, exposed in accounted)
        step = median(totals) if totals else 0.0
        self._read_exchanges(by_step)
        exchanged = self._exchange_shares[0] * step, self._exchange_shares[1] * step
        exposed = None if self._exposed_share is None else self._exposed_share * step
        phases = typical_step(steps, totals, exposed, exchanged)
        measured = accounted or distributed.ranks().world_size == 1
        return phases | {"own_work": phases["step"] - phases["communication"] if measured else math.nan}

    def _read_exchanges(self, by_step: Mapping[int, float]) -> None:
        """Take the exchanges of shared rows that were timed since the last record."""
        timer, timed = self._trainer.context.timer, [by_step[step] for step in self._exchange_steps if step in by_step]
        self._exchange_steps.clear()
        if timer is not None and timed:
            seconds = timer.take()
            self._exchange_seconds = sum(seconds) / len(timed)
            self._exchange_shares = seconds[0] / sum(timed), seconds[1] / sum(timed)

    def _statistics(self) -> dict[str, float]:
        found = self._trainer.statistics.take_tokens()
        weights, self._unchanged = self._unchanged, None
        top1, entropy = found or (math.nan, math.nan)
        unchanged, compared = (math.nan, math.nan) if weights is None else weights.tolist()
        balancing = self._trainer.statistics.take_load_balancing()
        return {
            "top1": top1,
            "entropy": entropy,
            "load_balancing": math.nan if balancing is None else balancing,
            "unchanged": unchanged,
            "compared": compared,
        }

    def _gpu_block(self) -> list[float]:
        """Samples of this machine's GPUs, from its first rank; NaN from the others. The same length on every rank, also
        if machines have different numbers of them."""
        width = len(nvml.FIELDS)
        taken = self._sampler.take() if self._sampler else []
        taken += [[] for _ in range(self._most_here - len(taken))]
        return [value for one in taken for value in (one or [math.nan] * width)]


def typical_step(
    steps: Sequence[dict[str, list[float]]],
    totals: Sequence[float],
    exposed: float | None,
    exchanged: tuple[float, float] = (0.0, 0.0),
) -> dict[str, float]:
    """Seconds of a typical step by phase: means over the middle half of the steps by duration, scaled to the median
    step, so that the phases add up to `step`. NaN without steps.

    A mean over all steps would be dominated by the few that compile, evict or wait for a disk; medians of each phase
    are robust but do not add up to a step. The middle half is both: outliers are cut off, and its phases are means of
    the same steps. The exposed communication comes from DDP, which measures other steps, so it is bounded by the
    backward pass that it is part of.

    Args:
        steps: seconds by phase of each step, as from `phases.split_steps`.
        exposed: communication of gradients that no computation hides; taken out of the backward pass. None if not
            known.
        exchanged: of shared rows between ranks, in forward and backward passes; taken out of them as well.
    """
    if not steps:
        return dict.fromkeys(("step", *PHASES), math.nan)
    order = np.argsort(totals, kind="stable")
    cut = len(order) // 4
    middle = [steps[index] for index in order[cut : len(order) - cut]]
    means = {name: fmean(sum(step[name]) for step in middle) for name in middle[0]}
    step = median(totals)
    scale = step / sum(means.values()) if sum(means.values()) else 0.0
    forward, backward = means["forward"] * scale, means["backward"] * scale
    in_forward = min(exchanged[0], forward) if exposed is not None else 0.0
    in_backward = min(exposed + exchanged[1], backward) if exposed is not None else 0.0
    return {
        "step": step,
        "data_wait": means["data"] * scale,
        "forward": forward - in_forward,
        "backward": backward - in_backward,
        "communication": math.nan if exposed is None else in_forward + in_backward,
        "optimizer": means["optimizer"] * scale,
        "other": means["other"] * scale,
    }


def exposed_and_hidden(model: Any) -> tuple[float, float] | None:
    """Exposed and overlapped communication time of the last step that DDP logged, in seconds: the time gradients were
    reduced after this rank's backward pass had ended, and during it. None with one rank or before the first step.

    DDP counts communication from the first full bucket until the last one has been reduced on all ranks, so waiting for
    a straggler is included. A step's statistics become available when the next forward pass begins; reading them does
    not block (`torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data`, in nanoseconds).
    """
    if not hasattr(model, "_get_ddp_logging_data"):
        return None
    data = model._get_ddp_logging_data()
    if "backward_comm_time" not in data:
        return None
    hidden = min(data["backward_compute_comm_overlap_time"], data["backward_comm_time"])
    return (data["backward_comm_time"] - hidden) / 1e9, hidden / 1e9


def _note_norms(accelerator: Any, norms: list[torch.Tensor | float]) -> None:
    """Keep the norm that each clipping of gradients returns, on the device."""
    clip = accelerator.clip_grad_norm_

    def clip_and_note(*args: object, **kwargs: object) -> Any:
        norm = clip(*args, **kwargs)
        if norm is not None:
            norms.append(norm.detach() if torch.is_tensor(norm) else norm)
        return norm

    accelerator.clip_grad_norm_ = clip_and_note


def _rank_record(rank: int, fields: dict[str, float], tokens: int, squares: int, gpu: JsonObject | None) -> RankRecord:
    known = {name: None if math.isnan(value) else value for name, value in fields.items()}
    for name in ("top1", "entropy", "load_balancing", "unchanged", "compared", *wrong_bits.FIELDS):
        known.pop(name)
    retries = int(known.pop("allocator_retries") or 0)
    return RankRecord(rank=rank, tokens=tokens, squared_lengths=squares, gpu=gpu, allocator_retries=retries, **known)


def gpus_by_rank(blocks: Sequence[Sequence[float]]) -> dict[int, JsonObject]:
    """Samples by global rank, from each machine's first rank."""
    width, found = len(nvml.FIELDS), {}
    for sender, block in enumerate(blocks):
        for local in range(len(block) // width):
            values = block[local * width : (local + 1) * width]
            one = dict(zip(nvml.FIELDS, values, strict=True))
            if math.isnan(one["samples"]):
                continue
            gpu: JsonObject = {name: None if math.isnan(value) else value for name, value in one.items()}
            gpu["samples"] = int(one["samples"])
            gpu["reasons"] = [name for bit, name in nvml.THROTTLE_REASONS.items() if int(one["reasons"]) & bit]
            found[sender + local] = gpu
    return found


def _known_sum(fields: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [one[name] for one in fields if not math.isnan(one[name])]
    return sum(values) if values else None
