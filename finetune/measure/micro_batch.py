"""The micro-batch size: the fastest that fits this job on this kind of GPU, found by running it.

The dry run searches as long as its time lasts. A run whose configuration leaves the size open takes the result of an
earlier search of the same job, or searches itself before its first step, as long as that is won back. The result of a
run does not depend on the size beyond rounding.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from finetune.data.layout import Layout
from finetune.engine.job import AS_CONFIGURED, Choice, Job
from finetune.engine.monitoring import peak_memory as process_memory
from finetune.engine.session.opening import total_steps
from finetune.measure import held, measurements, probe
from finetune.runtime import scripts
from finetune.runtime.ranks import activity, distributed
from finetune.runtime.types import JsonObject
from finetune.text import counted

if TYPE_CHECKING:
    from finetune.engine.training.trainer import SFTTrainer

NOISE = 0.01  # two sizes whose speed differs by less are equally fast
PASSES = 3  # of each size: the first compiles, the second runs while gradients are held, the third is timed
WON_BACK_STEPS = 50  # in which a search during a run has to be won back


# --- the search -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One micro-batch size, tried on the longest rows. The figures are None if the device ran out of memory."""

    per_device: int
    fits: bool
    peak_bytes: float | None
    tokens_per_second: float | None


def search(
    sizes: Sequence[int], start: int, attempt: Callable[[int], Attempt], over: Callable[[], bool] = lambda: False
) -> list[Attempt]:
    """Find the largest of `sizes` that fits: double from `start` until one does not fit (or halve until one does), then
    bisect between the last two. Every size is tried at most once.

    Args:
        sizes: allowed sizes, including `start`.
        over: whether the time is up; asked before each attempt.

    Returns:
        All attempts, by size.
    """
    ordered = sorted(set(sizes))
    tried: dict[int, Attempt] = {}

    def fits(place: int) -> bool:
        size = ordered[place]
        if size not in tried:
            tried[size] = attempt(size)
        return tried[size].fits

    good, bad = -1, len(ordered)
    place = ordered.index(start)
    while good < place < bad and not over():
        if fits(place):
            good = place
            doubled = [i for i in range(good + 1, bad) if ordered[i] <= 2 * ordered[good]]
            place = doubled[-1] if doubled else good + 1
            if bad < len(ordered):
                break
        else:
            bad = place
            halved = [i for i in range(good + 1, bad) if 2 * ordered[i] <= ordered[bad]]
            place = halved[-1] if halved else bad - 1
            if good >= 0:
                break
    while bad - good > 1 and good >= 0 and not over():
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return [tried[size] for size in ordered if size in tried]


def recommend(attempts: Sequence[Attempt], share: Callable[[int], float] = lambda size: 1.0) -> Attempt | None:
    """The fastest size that fits; of equally fast ones the smallest, because what memory is left costs nothing.

    Args:
        share: by size, the real tokens among all of a micro-batch of rows as they come. Padding makes a large
            micro-batch of padded rows slower than it is on the longest rows.
    """
    fitting = [one for one in attempts if one.fits]
    speed = {one.per_device: (one.tokens_per_second or 0.0) * share(one.per_device) for one in fitting}
    enough = (1 - NOISE) * max(speed.values(), default=0.0)
    fast = [one for one in fitting if speed[one.per_device] >= enough]
    return min(fast, key=lambda one: one.per_device, default=None)


def allowed_sizes(job: Job, world_size: int) -> list[int]:
    """Micro-batch sizes that divide a rank's share of the global batch and do not exceed the number of rows. If the
    accumulation is configured, only the current size."""
    training = job.config.training
    if training.gradient_accumulation_steps is not None:
        return [job.batch.per_device]
    share = job.batch.global_batch_size // world_size
    return [size for size in range(1, share + 1) if share % size == 0 and size <= max(len(job.layout), 1)]


def real_token_share(job: Job, world_size: int) -> Callable[[int], float]:
    """Real tokens among all tokens of the first epoch's micro-batches, by size; 1 for packs, whose padding is the same
    in each."""

    def share(size: int) -> float:
        if job.layout.padded_lengths is None:
            return 1.0
        accumulation = job.batch.global_batch_size // (world_size * size)
        rows = job.plan().deal_epoch(0, world_size=world_size, per_device=size, accumulation=accumulation)
        return float(job.layout.tokens[rows[rows >= 0]].sum() / job.layout.micro_batch_tokens(rows).sum())

    return share


def try_size(trainer: SFTTrainer, layout: Layout, per_device: int, memory: held.Memory) -> Attempt:
    """Run PASSES on the longest rows, the last for its speed."""
    rows = probe.longest_rows(layout, per_device)
    passed = probe.run_passes(trainer, *probe.batch_of(trainer, layout, rows), memory, PASSES)
    if passed is None:
        return Attempt(per_device=per_device, fits=False, peak_bytes=None, tokens_per_second=None)
    fits = held.fits(passed.peak_bytes, memory.limit_bytes)
    speed = int(layout.tokens[rows].sum()) / passed.seconds
    return Attempt(per_device=per_device, fits=fits, peak_bytes=passed.peak_bytes, tokens_per_second=speed)


def summary(
    attempts: Sequence[Attempt], limit_bytes: float, share: Callable[[int], float], sizes: Sequence[int]
) -> JsonObject:
    """The result of a search among `sizes`, for reports, run.json and the cache."""
    best = recommend(attempts, share)
    fitting = [one.per_device for one in attempts if one.fits]
    return {
        "limit_gib": limit_bytes / 2**30,
        "attempts": [asdict(one) for one in attempts],
        "largest_allowed": max(sizes),
        "largest_that_fits": max(fitting) if fitting else None,
        "recommended": best.per_device if best else None,
        "flag": shlex.join(scripts.setting_arguments("training.per_device_train_batch_size", best.per_device))
        if best
        else None,
    }


# --- in a run -------------------------------------------------------------------------------------------------------


def earlier_search(job: Job) -> JsonObject | None:
    """The `summary` of an earlier search of this job, if there is one."""
    return measurements.find_sizes(measurements.facts(job))


def choose(job: Job, kept: int | None, world: int) -> Choice[int]:
    """The size that is known before the model runs: the configured one, that of the checkpoint, or what an earlier
    search of this job found. Every rank calls it.

    Args:
        kept: the size in the checkpoint that the run resumes from.
        world: number of ranks of the run; a dry run is one of them.
    """
    training, now = job.config.training, job.batch.per_device
    if (training.per_device_train_batch_size, training.gradient_accumulation_steps) != (None, None):
        return Choice(value=now, reason=AS_CONFIGURED)
    if kept == now:
        return Choice(value=now, reason="as in the checkpoint")
    if held.Memory(job.stack.device).limit_bytes is None:
        return Choice(value=now, reason="the default: a CPU run has no memory of its own to fill")
    if training.strategy == "shard":  # a rank that runs out of memory would leave the others in a collective
        return Choice(value=now, reason="the default of a sharded run")
    if training.context_parallel > 1:
        return Choice(value=now, reason="the default of GPUs that share each row")
    sizes = allowed_sizes(job, world)
    attempts = _earlier_attempts(job, sizes)
    best = recommend(attempts, real_token_share(job, world))
    everywhere = distributed.gather_objects(None if best is None else best.per_device)
    size = everywhere[0]
    if size is not None and set(everywhere) == {size}:  # another machine may have another cache
        return Choice(value=size, reason="the fastest that fits, from an earlier search of this job")
    if len(sizes) == 1:
        return Choice(value=now, reason="the only one that the global batch allows")
    if (steps := total_steps(job)) < WON_BACK_STEPS:
        return Choice(value=now, reason=f"the default: {counted(steps, 'step')} do not win a search back")
    return Choice(value=now, reason="the default", searches=True)


def _earlier_attempts(job: Job, sizes: Sequence[int]) -> list[Attempt]:
    """What an earlier search of this job found for these sizes; nothing if it would have gone on to larger ones, had
    its number of ranks allowed them."""
    found = earlier_search(job)
    if found is None:
        return []
    attempts = [Attempt(**one) for one in found["attempts"]]
    if max(sizes) > found["largest_allowed"] == found["largest_that_fits"]:
        return []
    return [one for one in attempts if one.per_device in sizes]


def search_before_first_step(job: Job, trainer: SFTTrainer) -> Choice[int]:
    """Search before the first step, for as long as it is won back in WON_BACK_STEPS steps. Every rank calls it.

    A further size is tried while the time that the last one saves in so many steps is more than its own trial costs:
    a larger size saves less than the one before it, because what it saves is the part of a pass that does not grow with
    its rows.
    """
    began = time.perf_counter()
    memory = held.Memory(job.stack.device)
    world, start = distributed.ranks().world_size, job.batch.per_device
    share, sizes = real_token_share(job, world), allowed_sizes(job, world)
    assert memory.limit_bytes is not None
    memory.limit_bytes -= held.bytes_not_yet_allocated(trainer)
    tried: list[Attempt] = []

    def attempt(size: int) -> Attempt:
        everywhere = distributed.gather_objects(try_size(trainer, job.layout, size, memory))
        slowest = min(everywhere, key=lambda one: (one.fits, one.tokens_per_second or 0.0))
        tried.append(slowest)
        return slowest

    with activity.during("searching for the micro-batch size"):
        attempts = search(sizes, start, attempt, lambda: _trial_outweighs_gain(tried, job, world, share))
    process_memory.reset()
    found = summary(attempts, memory.limit_bytes, share, sizes)
    measurements.save_sizes(measurements.facts(job), found)
    size = found["recommended"] or min(one.per_device for one in attempts)
    reason = f"the fastest that fits of {', '.join(str(one.per_device) for one in attempts)}"
    return Choice(value=size, reason=reason, seconds=time.perf_counter() - began)


def _trial_outweighs_gain(tried: Sequence[Attempt], job: Job, world: int, share: Callable[[int], float]) -> bool:
    """Whether trying twice the rows costs more than it can save in WON_BACK_STEPS steps."""
    if len(tried) < 2 or not (tried[-1].fits and tried[-2].fits):
        return False  # nothing is known yet, or a size that fits is still to be found
    tokens = fmean(job.layout.tokens) * job.batch.global_batch_size / world
    before, now = (tokens / (one.tokens_per_second or 1.0) / share(one.per_device) for one in tried[-2:])
    trial = PASSES * now * world * 2 * tried[-1].per_device / job.batch.global_batch_size
    return WON_BACK_STEPS * (before - now) / 2 < trial
