"""Measurements of this machine, cached as small JSON files: `advise` predicts from them, and a run is compared with its
prediction afterwards."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from finetune.data.layout import Layout
from finetune.data.plan import Plan
from finetune.errors import UserError
from finetune.measure.predict import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    MIB,
    Curve,
    Gradients,
    Work,
    all_reduce_curve,
)
from finetune.runtime import bootstrap
from finetune.runtime.files import checksum_of_json, read_json, write_json
from finetune.runtime.types import JsonObject
from finetune.text import counted

if TYPE_CHECKING:
    from finetune.engine.job import Job

Kept = TypeVar("Kept")

# Fields of `Work` that a number of ranks does not change.
_AS_MEASURED = (
    *("per_device", "backward_share", "optimizer_seconds", "other_seconds", "steps", "start_up_seconds"),
    *("gradients", "peak_memory_bytes", "memory_bytes"),
)
WORLD_SIZES = (1, 2, 4, 8)  # for which a dry run estimates the compute time of the slowest rank


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Time and memory of a job on one device. If several ranks share each row, it is that of one of them
    (`context_group.StandIn`), without communication; lengths and tokens are those of whole rows.

    facts:              everything that decides the figures: model, adapter, data, batch, dtypes, device, versions
    seconds_per_micro_batch, seconds_per_token: intercept and slope: forward and backward of a micro-batch as a line
                        over its tokens, including padding
    residual_seconds:   residuals of single micro-batches from that line, centered, without outliers
    backward_share:     of forward and backward, 0 to 1
    data_seconds:       wait for one micro-batch
    optimizer_seconds, other_seconds: per step
    compute_seconds:    by number of ranks with different rows, forward and backward of a step's micro-batches on the
                        slowest rank, mean over an epoch
    tokens_per_step:    real tokens of a global step, mean over an epoch
    peak_memory_bytes:  of training with the largest micro-batch
    memory_bytes:       of the device; None for a CPU
    active_parameters:  of `parameters`, those that a token uses (`engine.model.experts.count`)
    gradient_bytes:     of each trained parameter, in the order of `model.parameters()`
    shared_by:          ranks that share each row
    """

    facts: JsonObject
    when: str
    per_device: int
    global_batch_size: int
    seconds_per_micro_batch: float
    seconds_per_token: float
    residual_seconds: list[float]
    backward_share: float
    data_seconds: float
    optimizer_seconds: float
    other_seconds: float
    start_up_seconds: float
    compute_seconds: dict[str, float]
    tokens_per_step: float
    steps: float
    peak_memory_bytes: float
    memory_bytes: float | None
    parameters: int
    active_parameters: int
    trainable_parameters: int
    gradient_bytes: list[int]
    gradient_dtype: str
    as_bucket_view: bool
    gradients_in_peak: bool
    bucket_cap_bytes: int
    first_bucket_bytes: int
    shared_by: int = 1

    def to_dict(self) -> JsonObject:
        """The measurement as JSON."""
        return {"kind": "measurement", **asdict(self)}

    @classmethod
    def from_dict(cls, content: JsonObject) -> Measurement:
        """The inverse of `to_dict`. Raises TypeError or KeyError for the file of another version."""
        return cls(**{item.name: content[item.name] for item in fields(cls)})

    @property
    def gradients(self) -> Gradients:
        """The gradients that DDP would send."""
        return Gradients(
            sizes=tuple(self.gradient_bytes),
            cap=self.bucket_cap_bytes,
            first=self.first_bucket_bytes,
            as_bucket_view=self.as_bucket_view,
            in_peak=self.gradients_in_peak,
        )

    def work(self, world_size: int, compute_seconds: float | None = None) -> Work:
        """The share of one of `world_size` ranks.

        Args:
            compute_seconds: per step; None for the mean over an epoch.

        Raises:
            UserError: the global batch does not divide into micro-batches of this size on that many ranks.
        """
        data_ranks, rest = divmod(world_size, self.shared_by)
        if rest or self.global_batch_size % (data_ranks * self.per_device):
            shared = "" if self.shared_by == 1 else f", of which {self.shared_by} share each row,"
            raise UserError(
                f"The global batch does not divide exactly: {counted(self.global_batch_size, 'row')} on "
                f"{counted(world_size, 'rank')}{shared} in "
                f"micro-batches of {self.per_device}. Choose another number of GPUs or micro-batch size."
            )
        accumulation = self.global_batch_size // (data_ranks * self.per_device)
        return Work(
            accumulation=accumulation,
            compute_seconds=self.compute_seconds[str(data_ranks)] if compute_seconds is None else compute_seconds,
            data_seconds=self.data_seconds * accumulation,
            tokens=self.tokens_per_step,
            **{name: getattr(self, name) for name in _AS_MEASURED},
        )


# --- micro-batches --------------------------------------------------------------------------------------------------


DRAWS = 256  # at least this many resampled steps: the standard error of the mean is 1/16 of one step's deviation


def slowest_rank_seconds(
    plan: Plan,
    layout: Layout,
    *,
    world_size: int,
    per_device: int,
    line: tuple[float, float],
    residuals: Sequence[float] = (),
    shared_by: int = 1,
) -> np.ndarray:
    """Expected forward and backward time of each step of the first epoch on the slowest rank, float64 [steps].

    DDP waits for that rank in the last micro-batch, so it determines the step time. It has the most tokens, or it is a
    straggler by chance: micro-batches of equal size differ by their documents and by other work of the host. So the
    measured residuals are resampled (bootstrap) for each rank's micro-batches.

    Args:
        line: intercept and slope: seconds per micro-batch and per token.
        residuals: measured residuals from that line, in seconds.
        world_size, shared_by: ranks with different rows, and ranks that share each of them.
    """
    accumulation = plan.global_batch_size // (world_size * per_device)
    rows = plan.deal_epoch(0, world_size=world_size, per_device=per_device, accumulation=accumulation)
    seconds = line[0] + line[1] * layout.micro_batch_tokens(rows, shared_by)
    if world_size > 1 and residuals:
        times = -(-DRAWS // len(seconds))
        seconds = seconds + np.random.default_rng(0).choice(residuals, (times, *seconds.shape))
    return seconds.sum(axis=-2).max(axis=-1).reshape(-1, len(rows)).mean(axis=0)


# --- the measurement cache ------------------------------------------------------------------------------------------


def facts(job: Job) -> JsonObject:
    """Everything that decides the time and memory of a job's micro-batches."""
    import torch

    from finetune.engine.model.load_arguments import resolve_dtype

    config = job.config
    found = {f"model.{key}": value for key, value in asdict(config.model).items()}
    if not config.model.full_finetuning:
        found |= {f"lora.{key}": value for key, value in asdict(config.lora).items()}
    found |= {f"training.{key}": value for key, value in config.training.extra.items()}
    if config.training.context_parallel > 1:
        found["training.context_parallel"] = config.training.context_parallel
    found |= {
        "the size of the model": [job.size.matmul_parameters, job.size.trainable_parameters, job.size.layers],
        "data": job.data.fingerprint,
        "tokens per pack": job.layout.packs.pack_length,
        "training.per_device_train_batch_size": job.batch.per_device,
        "training.global_batch_size": job.batch.global_batch_size,
        "training.optim": config.training.optim,
        "training.gradient_checkpointing": config.training.gradient_checkpointing,
        "training.cuda_graphs": config.training.cuda_graphs,
        "clipping": config.training.max_grad_norm > 0,
        "dtype": str(resolve_dtype(config, job.stack)).removeprefix("torch."),
        "backend": job.stack.backend,
        "patches": sorted({one.name for one in job.stack.patches if one.applied} - {"transformers_slow_import"}),
        "device": job.hardware.name,
        "CPU threads per process": torch.get_num_threads() if job.stack.device == "cpu" else None,
        "versions": bootstrap.versions(),
    }
    return json.loads(json.dumps(found, default=str))


def bucket_limits(extra: JsonObject) -> tuple[int, int]:
    """(cap, first) of DDP's buckets in bytes. An explicit cap also limits the first bucket (torch's
    BucketCapacityConfig); accelerate passes it on if it differs from the default."""
    cap = int(extra.get("ddp_bucket_cap_mb") or 0) * MIB
    return (cap, cap) if cap not in (0, BUCKET_BYTES) else (BUCKET_BYTES, FIRST_BUCKET_BYTES)


def folder() -> Path:
    """The folder of cached measurements."""
    return bootstrap.cache_folder() / "measurements"


def digest(found: JsonObject) -> str:
    """The cache key of facts."""
    return checksum_of_json(found)


def save(measurement: Measurement) -> Path:
    """Write a measurement to the cache, replacing an older one of the same job."""
    path = folder() / f"job-{digest(measurement.facts)}.json"
    write_json(path, measurement.to_dict())
    return path


_OF_A_SIZE = ("training.per_device_train_batch_size", "training.global_batch_size")
_OF_A_MODE = (*_OF_A_SIZE, "training.gradient_checkpointing", "model.tiled_mlp")


def _shared_file(kind: str, found: JsonObject, but: Sequence[str]) -> Path:
    """Of all jobs that have these facts but for some."""
    return folder() / f"{kind}-{digest({name: value for name, value in found.items() if name not in but})}.json"


def modes_file(found: JsonObject) -> Path:
    """The file of how the activations of this job can be kept, at any batch."""
    return _shared_file("modes", found, _OF_A_MODE)


def save_sizes(found: JsonObject, search: JsonObject) -> None:
    """Write a search for a job's micro-batch size (`micro_batch.summary`) to the cache."""
    note(_shared_file("sizes", found, _OF_A_SIZE), {"kind": "micro-batch sizes", **search})


def find_sizes(wanted: JsonObject) -> JsonObject | None:
    """The last search for the micro-batch size of this job, at any global batch; None without one."""
    known = {"per_device", "fits", "peak_bytes", "tokens_per_second"}

    def checked(content: JsonObject) -> JsonObject | None:
        whole = {"largest_allowed", "largest_that_fits"} <= content.keys()
        return content if whole and all(one.keys() == known for one in content["attempts"]) else None

    return read(_shared_file("sizes", wanted, _OF_A_SIZE), checked)


def save_graphs(found: JsonObject, launched: float | None, replayed: float | None) -> None:
    """Note that this job's recorded passes are right and faster: the seconds of a launched and of a replayed pass."""
    content = {"kind": "CUDA graphs", "launched_seconds": launched, "replayed_seconds": replayed}
    note(_shared_file("graphs", found, ()), content)


def find_graphs(wanted: JsonObject) -> JsonObject | None:
    """What `save_graphs` has noted of this job; None if nothing."""
    names = ("launched_seconds", "replayed_seconds")
    found = read(_shared_file("graphs", wanted, ()), lambda content: {name: float(content[name]) for name in names})
    return found if found and all(0 < seconds < math.inf for seconds in found.values()) else None


def find(wanted: JsonObject) -> tuple[Measurement | None, str]:
    """The measurement of these facts and its file; or None and the reason: what differs in the nearest one."""
    return look_up("job", wanted, Measurement.from_dict, lambda one: one.facts)


def look_up(
    kind: str, wanted: JsonObject, parse: Callable[[JsonObject], Kept], facts_of: Callable[[Kept], JsonObject]
) -> tuple[Kept | None, str]:
    """What the cache has of a kind for these facts, and its file; or None and the reason: what differs in the nearest
    one.

    Args:
        kind: with which the names of its files begin.
        parse: makes it of a file's content.
    """
    path = folder() / f"{kind}-{digest(wanted)}.json"
    if (found := read(path, parse)) is not None:
        return found, str(path)
    every = (read(other, parse) for other in folder().glob(f"{kind}-*.json"))
    others = [facts_of(one) for one in every if one is not None]
    model = "model.model_name_or_path"
    same_model = [other for other in others if other.get(model) == wanted.get(model)]
    if not same_model:
        return None, "no dry run of this model was measured on this machine (run with `--dry-run` first)"
    differing = ([name for name in other | wanted if other.get(name) != wanted.get(name)] for other in same_model)
    names = sorted(min(differing, key=len))
    return None, f"the nearest dry run differs in: {', '.join(names)}"


def read(path: Path, parse: Callable[[JsonObject], Kept]) -> Kept | None:
    """What a file of the cache has; None if it is missing, damaged or from another version."""
    try:
        return parse(read_json(path))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None


def note(path: Path, content: JsonObject) -> None:
    """Write to the cache what spares a later start its search. No run ends because it cannot be written."""
    with contextlib.suppress(OSError):
        write_json(path, content)


# --- communication --------------------------------------------------------------------------------------------------


# NCCL variables that decide the time of a collective: a curve is valid for runs with the same values.
SPEED_VARIABLES = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE")


def comm_file(world_size: int, backend: str, device: str, environment: Mapping[str, str], machines: int = 1) -> Path:
    """The file of the collectives of `world_size` ranks on these devices in this environment, on so many machines."""
    deciding = (
        [f"{name}={environment[name]}" for name in SPEED_VARIABLES if name in environment] if backend == "nccl" else []
    )
    name = re.sub(r"[^A-Za-z0-9]+", "-", " ".join([device, *deciding])).strip("-")
    where = f"-on-{machines}-machines" if machines > 1 else ""
    return folder() / f"comm-{backend}-{name}-{world_size}{where}.json"


def save_comm(measured: JsonObject, device: str) -> Path:
    """Write the result of `bench comm` on devices of this name to the cache."""
    machines = measured.get("machines", 1)
    path = comm_file(measured["world_size"], measured["backend"], device, measured["environment"], machines)
    write_json(path, measured)
    return path


def find_comm(
    world_size: int, backend: str, device: str, environment: Mapping[str, str], machines: int = 1
) -> tuple[Curve | None, str]:
    """The all-reduce curve of ranks with this environment on so many machines, and its file; or None and the reason."""
    path = comm_file(world_size, backend, device, environment, machines)
    if not path.is_file():
        same = [f"{name}={environment[name]}" for name in SPEED_VARIABLES if name in environment]
        where, how = "on this machine", "`finetune bench comm`"
        if machines > 1:
            where, how = f"on {machines} machines", "`torchrun ... -m finetune bench comm` on all of them"
        return None, (
            f"no all-reduce of {world_size} ranks was measured {where} with {' '.join([backend, *same])} (run {how} "
            "first)"
        )
    try:
        return read_comm(path)[world_size], str(path)
    except (UserError, KeyError):
        return None, f"{path} is damaged or from another version"


def read_comm(path: Path) -> dict[int, Curve]:
    """The all-reduce curve of each world size in a file of `bench comm --json`: one measurement, or several under the
    key `runs`.

    Raises:
        UserError: the file is not such a result.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        # Of several settings at one world size the first counts: the recommended ones.
        return {int(one["world_size"]): all_reduce_curve(one) for one in reversed(content.get("runs", [content]))}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"Not a valid result of `finetune bench comm --json`: {path} ({type(error).__name__}: {error}). "
            "Measure again, or leave out --comm."
        ) from None
