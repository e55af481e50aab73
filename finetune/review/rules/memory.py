"""Memory that is nearly full."""

from __future__ import annotations

from collections.abc import Sequence

from finetune.config.batch import ranks_to_share_longer_rows
from finetune.review.finding import Finding, confidence, micro_batch, percent
from finetune.review.run import Run
from finetune.review.values import count

FULL = 0.92  # of the fullest GPU, by what torch's allocator reserved; to start with, until retries are measured


def fullest(run: Run) -> float | None:
    """Memory in use on the fullest GPU, 0 to 1: the largest value of the run."""
    return run.series("fullest").highest


def retries(run: Run) -> float | None:
    """Times that torch's allocator freed its cache and tried again, on all ranks."""
    series = run.series("allocator_retries").finite()
    return float(series.values.sum()) if len(series) else None


def _activation_measure(run: Run) -> str:
    """The next setting that makes a row need less memory."""
    kind, on_unsloth = run.at("config.training.gradient_checkpointing"), run.at("backend") == "unsloth"
    if kind and (kind == "offload" or on_unsloth and kind == "unsloth"):
        if not run.at("config.model.tiled_mlp"):
            return "model.tiled_mlp: true"
        gpus = max(run.world_size or 1, count(run.at("hardware.count")) or 1)
        more = ranks_to_share_longer_rows(run.context_parallel, gpus)
        if run.number("batch.per_device") != 1 or on_unsloth or more is None:
            return "a lower data.max_length"
        return f"training.context_parallel: {more} on {gpus} GPUs, or a lower data.max_length"
    return f"training.gradient_checkpointing: {'unsloth' if on_unsloth else 'offload' if kind else 'true'}"


def near_limit(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """The fullest GPU is at least 92 % full, or torch's allocator had to retry, which stalls the GPU by definition."""
    full, again = fullest(run), retries(run)
    if not run.on_gpus or ((full or 0.0) < FULL and not again):
        return None
    share = percent(full) if full is not None else "not recorded"
    batch = run.number("batch.per_device")
    smaller = f"{micro_batch(batch // 2, batch)}, with the same global batch" if batch and batch > 1 else ""
    measure = _activation_measure(run)
    is_on = bool(run.at("config.training.gradient_checkpointing"))
    advice = smaller if is_on and smaller else f"{measure}{', or ' + smaller if smaller else ''}"
    return Finding(
        rule="memory-near-limit",
        headline="GPU memory is nearly full",
        figures=(f"fullest GPU {share}", f"{again or 0:.0f} allocator retries"),
        evidence=f"The fullest GPU: {share} of its memory (threshold {percent(FULL)}); {again or 0:.0f} allocator "
        "retries (threshold 1). A longer row can end the run.",
        advice=advice,
        gain=f"below {percent(FULL)} of the memory: no stalls by the allocator, no out-of-memory error",
        confidence="high" if again else confidence(full or 0.0, FULL, 10),
        charts=("fullest", "allocator_retries", "reserved_of_rank"),
    )
