"""The dry run of a model that will be sharded: two slices of it, each measured by a dry run in a separate process."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from finetune.config import Config, fixed_batch_arguments, resolve_batch
from finetune.engine.optimizer import master_weights
from finetune.engine.sharding import shard
from finetune.errors import RunError
from finetune.measure import (
    dry_run_report,
    held,
    measurements,
    slices,
    strategy,
    subprocess_dry_run,
)
from finetune.measure.measurements import Measurement
from finetune.redact import redact_tree
from finetune.runtime.command import DONE, FAILED, console, print_line
from finetune.runtime.files import write_json
from finetune.runtime.machine.hardware import probe
from finetune.runtime.types import JsonObject
from finetune.text import counted

SHARDED_WORLDS = (2, 4, 8)  # for which a sharded run is predicted


def measure_slices(config: Config, folder: Path, layers: int, world: int) -> int:
    """Measure two slices of a model that will be sharded, each by a dry run in a process of its own, and report what
    each rank needs. Returns 0 for go, 1 for no-go.

    Raises:
        RunError: a slice does not train.
    """
    sizes = held.read_sizes(folder)
    if sizes is None:
        raise RunError(f"The sizes of the layers cannot be read: {folder} has no safetensors files.")
    cut = slices.slice_layers(layers, sizes.dense_layers)
    assert cut is not None
    config = master_weights.resolve_auto(config, probe().memory_gib, sizes.total)
    world = max(world, SHARDED_WORLDS[0])  # on one GPU there is nothing to share
    batch = resolve_batch(config.training, world, config.data)
    fixing = fixed_batch_arguments(config.training, world, config.data)
    target, given = strategy.training_command()
    given = dry_run_report.training_arguments(given)
    reports = []
    with tempfile.TemporaryDirectory(prefix="slices-") as place:
        for count in cut:
            model = slices.write_slice(folder, count, Path(place) / f"{count}-layers")
            with console().status(f"dry run of {counted(count, 'layer')} of {layers}"):
                changed = {
                    "model.model_name_or_path": model,
                    "training.per_device_train_batch_size": batch.per_device,
                    "training.global_batch_size": batch.global_batch_size,
                    "training.master_weights": config.training.master_weights,
                }
                if config.training.leaves_activations_open:  # a slice would take another
                    changed["training.gradient_checkpointing"] = "true"
                settings = [word for key, value in changed.items() for word in (f"--{key}", str(value))]
                reports.append(
                    subprocess_dry_run.run(
                        target,
                        [*given, *settings, *fixing, "--dry-run"],
                        on_gpu=bool(strategy.visible_gpus()),
                        ranks=world,
                        environment={slices.VARIABLE: "1"},
                    )
                )
    count, refused = next(((n, one) for n, one in zip(cut, reports, strict=True) if not one["go"]), (0, None))
    line = dry_run_report.launch_line(world)
    about = {"config": config.to_dict()}
    if refused is not None:
        reason = f"{counted(count, 'layer')} of {layers} already fail: {refused['reason']}"
        print_line(f"NO-GO: {reason}", style="red")
        if refused.get("out_of_memory"):
            about |= {"sharded": {"rows": []}}
        if config.json:
            write_json(config.json, redact_tree({"go": False, "reason": reason, "launch": line, **about}))
        return FAILED
    few, more = (Measurement.from_dict(one["measurement"]) for one in reports)
    once = shard.would_reduce_once(config)
    saved, all_saved = ([one[name] for one in reports] for name in ("saved_bytes", "saved_bytes_without_checkpointing"))
    found = slices.from_slices(few, more, saved, all_saved, cut, layers, config, sizes, once)
    tokens = reports[-1]["longest_row_tokens"] * found.whole.per_device
    result = sharded_result(found, tokens, world)
    result |= {"measurement_file": str(slices.save(found)), **about}
    dry_run_report.print_shards(config, found, result, cut, line)
    return DONE if result["go"] else FAILED


def sharded_result(found: slices.Sharded, tokens: int, world: int) -> JsonObject:
    """Figures by number of ranks on which the global batch divides, and whether `world` of them hold the model.

    Args:
        tokens: of the longest micro-batch.
    """
    whole, gib = found.whole, 2**30
    device = whole.memory_bytes
    limit = None if device is None else held.limit_of(device)
    rows = []
    worlds: set[int] = {*SHARDED_WORLDS, *([world] if world > 1 else [])}
    backend = "gloo" if device is None else "nccl"
    shared = whole.shared_by
    for ranks in sorted(worlds):
        groups, rest = divmod(ranks, shared)
        if rest or whole.global_batch_size % (groups * whole.per_device):
            continue
        curve, source = None, "the exchanges of shared rows are not predicted"
        if shared == 1:
            curve, source = measurements.find_comm(ranks, backend, whole.facts["device"], os.environ)
        seconds = whole.compute_seconds.get(str(groups), whole.compute_seconds["1"] / groups)
        one = slices.predict(found, whole.work(ranks, seconds), ranks, curve)
        rows.append(
            {
                "world_size": ranks,
                "peak_memory_gib": one.peak_memory_bytes / gib,
                "step_seconds": one.step_seconds,
                "exposed_seconds": None if curve is None else one.exposed_seconds,
                "communication": source,
                "tokens_per_second": one.tokens_per_second,
                "fits": held.fits(one.peak_memory_bytes, limit),
            }
        )
    fitting = [row["world_size"] for row in rows if row["fits"]]
    reason = None
    if world not in fitting:
        where = f"it fits on {fitting[0]}" if fitting else f"{rows[-1]['world_size']} are not enough either"
        reason = f"the job does not fit on {world} GPUs; {where}"
    kept = {"layers": found.activation_bytes / gib, "outside": found.fixed_bytes / gib}
    return {
        "go": reason is None,
        "reason": reason,
        "sharded": {"rows": rows, "activation_gib": kept, "device_gib": device and device / gib},
        "longest_row_tokens": tokens // whole.per_device,
        "measurement": whole.to_dict(),
    }
