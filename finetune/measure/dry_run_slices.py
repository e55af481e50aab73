"""The dry run of a model that will be sharded: two slices of it, each measured by a dry run in a separate process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune.config import Config, fixed_batch_arguments, resolve_batch
from finetune.engine.optimizer import master_weights
from finetune.engine.sharding import shard
from finetune.errors import RunError
from finetune.measure import (
    activations,
    dry_run_report,
    measurements,
    rules,
    sharding,
    slices,
    strategy,
    subprocess_dry_run,
)
from finetune.measure.activations import Measured, Rows
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
    sizes = sharding.read_sizes(folder)
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
    result = sharded_result(found, tokens, world, Longest.read(reports, cut))
    result |= {"measurement_file": str(slices.save(found)), **about}
    dry_run_report.print_shards(config, found, result, cut, line)
    return DONE if result["go"] else FAILED


@dataclass(frozen=True, kw_only=True)
class Longest:
    """Ways to keep activations, measured in two slices of the model, of which `own` is the job's."""

    few: list[Measured]
    more: list[Measured]
    cut: tuple[int, int]
    rows: Rows
    own: JsonObject

    @classmethod
    def read(cls, reports: Sequence[JsonObject], cut: tuple[int, int]) -> Longest | None:
        """From the dry runs of two slices; None if they ran without a limit of memory."""
        longest = [one["longest_rows"] for one in reports]
        if None in longest:
            return None
        few, more = ([Measured.from_dict(mode) for mode in one["modes"]] for one in longest)
        return cls(few=few, more=more, cut=cut, rows=Rows(**longest[1]["rows"]), own=longest[1]["own"])

    def whole(self, found: slices.Sharded, world: int, limit: float) -> list[Measured]:
        """In all layers, on one of so many ranks."""
        return slices.whole_modes(self.few, self.more, self.cut, found, world, limit)

    def own_longest(self, found: slices.Sharded, world: int, limit: float) -> int | None:
        """Tokens of the longest row that fits as the job keeps its activations."""
        modes = self.whole(found, world, limit)
        own = next((one for one in modes if vars(one.mode).items() <= self.own.items()), None)
        return None if own is None else own.longest(limit)


def sharded_result(found: slices.Sharded, tokens: int, world: int, longest: Longest | None) -> JsonObject:
    """Figures by number of ranks on which the global batch divides, and whether `world` of them hold the model.

    Args:
        tokens: of the longest micro-batch.
        longest: None on a device without a limit.
    """
    whole, gib = found.whole, 2**30
    device = whole.memory_bytes
    limit = None if device is None else rules.MEMORY_MARGIN * device
    rows = []
    worlds: set[int] = {*SHARDED_WORLDS, *([world] if world > 1 else [])}
    backend = "gloo" if device is None else "nccl"
    shared, exchange, between = whole.shared_by, None, ""
    if shared > 1:
        exchange, between = measurements.find_exchange(shared, backend, whole.facts["device"], os.environ)
    for ranks in sorted(worlds):
        groups, rest = divmod(ranks, shared)
        if rest or whole.global_batch_size % (groups * whole.per_device):
            continue
        curve, source = measurements.find_comm(ranks, backend, whole.facts["device"], os.environ)
        if shared > 1:
            source = f"{source} and {between}"
        known = curve is not None and (shared == 1 or exchange is not None)
        seconds = whole.compute_seconds.get(str(groups), whole.compute_seconds["1"] / groups)
        one = slices.predict(found, whole.work(ranks, seconds), ranks, curve, exchange)
        rows.append(
            {
                "world_size": ranks,
                "peak_memory_gib": one.peak_memory_bytes / gib,
                "step_seconds": one.step_seconds,
                "exposed_seconds": one.exposed_seconds if known else None,
                "communication": source,
                "tokens_per_second": one.tokens_per_second,
                "fits": limit is None or one.peak_memory_bytes <= limit,
                "longest_row_tokens": longest and limit and longest.own_longest(found, ranks, limit),
            }
        )
    fitting = [row["world_size"] for row in rows if row["fits"]]
    reason = None
    if world not in fitting:
        where = f"it fits on {fitting[0]}" if fitting else f"{rows[-1]['world_size']} are not enough either"
        reason = f"the job does not fit on {world} GPUs; {where}"
    modes = None
    if longest is not None and limit is not None:
        there = longest.whole(found, world, limit)
        modes = activations.to_dict(there, longest.rows, limit) | {"own": longest.own, "proof": None}
        if reason is not None and (settings := activations.remedy(there, longest.rows, limit, world)) is not None:
            reason += f"; on {world} it is predicted to fit with {settings}"
    kept = {"layers": found.activation_bytes / gib, "outside": found.fixed_bytes / gib}
    return {
        "go": reason is None,
        "reason": reason,
        "sharded": {"rows": rows, "activation_gib": kept, "device_gib": device and device / gib},
        "longest_rows": modes,
        "longest_row_tokens": tokens // whole.per_device,
        "measurement": whole.to_dict(),
    }
