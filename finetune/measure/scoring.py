"""Compare a finished run with its prediction, for run.json and TensorBoard."""

from __future__ import annotations

import os
from dataclasses import replace
from statistics import fmean, median
from typing import TYPE_CHECKING

from finetune.measure import measurements, slices
from finetune.measure.measurements import slowest_rank_seconds
from finetune.measure.predict import Curve, Prediction, Work, predict
from finetune.runtime.ranks import distributed, process_group
from finetune.runtime.tags import tag
from finetune.runtime.types import JsonObject

if TYPE_CHECKING:
    from finetune.engine.job import Job
    from finetune.engine.monitoring.event_file import EventFile
    from finetune.measure.measurements import Measurement
    from finetune.measure.slices import Sharded

FIELDS = {
    "step_seconds": "step time",
    "peak_memory_gib": "peak memory",
    "tokens_per_second_per_gpu": "tokens/s per device",
}  # what is predicted, and what people call it


def score(job: Job, results: JsonObject) -> JsonObject:
    """The `prediction` of run.json: {source, step_seconds, peak_memory_gib, tokens_per_second_per_gpu}, each of the
    three as {predicted, measured, error} with error = (predicted - measured) / measured. Without a measurement of this
    exact job the three are null and `reason` names what is missing.

    Args:
        results: `RunLogger.results()`. The step time is the median over all steps but the first, the memory
            that of the rank with the highest peak.
    """
    world = distributed.ranks().world_size
    if job.context.size > 1:
        return _not_scored("ranks that share each row exchange it, which a dry run does not time")
    sharded = None
    if job.config.training.strategy == "shard" and world > 1:
        sharded, source = slices.find(measurements.facts(job))
        measured = None if sharded is None else sharded.whole
    else:
        measured, source = measurements.find(measurements.facts(job))
    if measured is None:
        return _not_scored(source)
    curve = None
    if world > 1:
        backend = "nccl" if job.stack.device == "cuda" else "gloo"
        curve, where = measurements.find_comm(
            world, backend, job.hardware.name, os.environ, process_group.machine_count()
        )
        if curve is None:
            return _not_scored(where)
        source = f"{source} and {where}"
    return {
        "source": source,
        "reason": None,
        **compare(*expected_predictions(job, measured, world, curve, sharded), results),
    }


def expected_predictions(
    job: Job,
    measured: Measurement,
    world: int,
    curve: Curve | None,
    sharded: Sharded | None = None,
) -> tuple[Prediction, Prediction]:
    """Predictions for the steps of this run at this world size: for the median step, and for the mean. The first step
    is left out, as in the measured results, because it compiles kernels.

    Args:
        sharded: what `measured` belongs to, of a run that shards its model.
    """

    def one(work: Work) -> Prediction:
        if sharded is not None:
            return slices.predict(sharded, work, world, curve)
        return predict(work, world, curve)

    plan, layout = job.plan(), job.layout
    line = measured.seconds_per_micro_batch, measured.seconds_per_token
    seconds = slowest_rank_seconds(
        plan,
        layout,
        world_size=world,
        per_device=job.batch.per_device,
        line=line,
        residuals=measured.residual_seconds,
    )
    tokens = [float(layout.tokens[plan.step_rows(0, step)].sum()) for step in range(plan.steps_per_epoch)]
    count = job.config.training.max_steps
    ran = slice(min(1, len(seconds) - 1), count if count > 1 else None)
    work = measured.work(world, float(median(seconds[ran])))
    typical = one(work)
    mean = replace(work, compute_seconds=fmean(seconds[ran]), tokens=fmean(tokens[ran]))
    return typical, one(mean)


def compare(typical: Prediction, mean: Prediction, results: JsonObject) -> dict[str, dict[str, float | None]]:
    """Predicted and measured values by field of run.json. Pure."""
    pairs = {
        "step_seconds": (typical.step_seconds, results["step_seconds_median"]),
        "peak_memory_gib": (typical.peak_memory_bytes / 2**30, max(results["peak_memory_gib"])),
        "tokens_per_second_per_gpu": (mean.tokens_per_second_per_gpu, results["tokens_per_second_per_gpu"]),
    }
    return {
        name: {"predicted": predicted, "measured": found, "error": (predicted - found) / found if found else None}
        for name, (predicted, found) in pairs.items()
    }


def write(writer: EventFile | None, prediction: JsonObject, step: int) -> None:
    """Write the errors to TensorBoard. `writer` is None on ranks that do not log."""
    for name in FIELDS:
        if writer is not None and prediction[name] is not None and prediction[name]["error"] is not None:
            writer.add_scalar(tag(f"prediction_error_{name}"), prediction[name]["error"], step)


def sentence(prediction: JsonObject) -> str | None:
    """The comparison as one sentence, for the end of a run; None without a prediction or a measurement."""
    known = [(name, one["error"]) for name in FIELDS if (one := prediction[name]) and one["error"] is not None]
    errors = ", ".join(f"{FIELDS[name]} {error:+.0%}".replace("%", " %") for name, error in known)
    return f"Predicted by the dry run, against what was measured: {errors}." if errors else None


def _not_scored(reason: str) -> JsonObject:
    return {"source": None, "reason": reason, **dict.fromkeys(FIELDS)}
