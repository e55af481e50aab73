"""What was measured on this machine, kept as small JSON files: so that `advise` can reckon with it, and a run can say
afterwards how right the prediction was."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.data.collate import MULTIPLE
from finetune.data.layout import Layout
from finetune.data.plan import Plan
from finetune.errors import UserError
from finetune.measure.predict import BUCKET_BYTES, FIRST_BUCKET_BYTES, MIB, Curve, Gradients, Work, all_reduce_curve
from finetune.runtime import bootstrap
from finetune.runtime.files import write_json

if TYPE_CHECKING:
    from finetune.engine.job import Job

WORLD_SIZES = (1, 2, 4, 8)  # those that a dry run reckons the ranks' shares for


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one device takes for a job.

    facts:              all that decides the figures: model, adapter, data, batch, types, device, versions
    seconds_per_micro_batch, seconds_per_token: forward and backward of a micro-batch are their sum, over its tokens
                        with padding
    residual_seconds:   how far single micro-batches were from that, their mean taken out, without outliers
    backward_share:     of forward and backward, 0 to 1
    data_seconds:       wait for one micro-batch
    optimizer_seconds, other_seconds: of a step
    compute_seconds:    by world size, forward and backward of a step's micro-batches on the slowest rank, mean over an
                        epoch
    tokens_per_step:    real tokens of a global step, mean over an epoch
    peak_memory_bytes:  of training at the worst micro-batch
    memory_bytes:       of the device; None for a CPU
    gradient_bytes:     of each trained parameter, in the order of `model.parameters()`
    """

    facts: dict[str, Any]
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
    trainable_parameters: int
    gradient_bytes: list[int]
    gradient_dtype: str
    as_bucket_view: bool
    gradients_in_peak: bool
    bucket_cap_bytes: int
    first_bucket_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"kind": "measurement", **asdict(self)}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Measurement:
        """The inverse. Raises TypeError or KeyError for what another version wrote, but reads files from before
        `global_size` became `global_batch_size`."""
        if "global_size" in content:
            content = content | {"global_batch_size": content["global_size"]}
        return cls(**{item.name: content[item.name] for item in fields(cls)})

    @property
    def gradients(self) -> Gradients:
        """What DDP would send."""
        return Gradients(
            sizes=tuple(self.gradient_bytes),
            cap=self.bucket_cap_bytes,
            first=self.first_bucket_bytes,
            as_bucket_view=self.as_bucket_view,
            in_peak=self.gradients_in_peak,
        )

    def work(self, world_size: int, compute_seconds: float | None = None) -> Work:
        """A step of one of `world_size` ranks.

        Args:
            compute_seconds: of the steps in question; None takes the mean over an epoch.

        Raises:
            UserError: the world size does not hold the global batch in micro-batches of this size.
        """
        if self.global_batch_size % (world_size * self.per_device):
            raise UserError(
                f"{world_size} ranks do not hold {self.global_batch_size} rows in micro-batches of {self.per_device}"
            )
        accumulation = self.global_batch_size // (world_size * self.per_device)
        return Work(
            per_device=self.per_device,
            accumulation=accumulation,
            compute_seconds=self.compute_seconds[str(world_size)] if compute_seconds is None else compute_seconds,
            backward_share=self.backward_share,
            data_seconds=self.data_seconds * accumulation,
            optimizer_seconds=self.optimizer_seconds,
            other_seconds=self.other_seconds,
            tokens=self.tokens_per_step,
            steps=self.steps,
            start_up_seconds=self.start_up_seconds,
            gradients=self.gradients,
            peak_memory_bytes=self.peak_memory_bytes,
            memory_bytes=self.memory_bytes,
        )


# --- micro-batches --------------------------------------------------------------------------------------------------


def micro_batch_tokens(rows: np.ndarray, layout: Layout) -> np.ndarray:
    """Tokens with padding of micro-batches of rows, int64 [..., per_device] -> int64 [...]."""
    per_device = rows.shape[-1]
    if layout.padded_lengths is None:
        return np.full(rows.shape[:-1], per_device * int(layout.packs.pack_length or 0), dtype=np.int64)
    longest = np.where(rows >= 0, layout.padded_lengths[rows], 1).max(axis=-1).astype(np.int64)
    return -(-longest // MULTIPLE) * MULTIPLE * per_device


DRAWS = 256  # steps at least that chance is drawn for: their mean is then known to a sixteenth of one step's spread


def slowest_rank_seconds(
    plan: Plan,
    layout: Layout,
    *,
    world_size: int,
    per_device: int,
    line: tuple[float, float],
    residuals: Sequence[float] = (),
) -> np.ndarray:
    """Forward and backward of each step of the first epoch on the slowest rank, as expected, float64 [steps].

    DDP waits for that rank in the last micro-batch, so it decides the step. It is the one that has the most tokens, or
    the one that chance holds up: equal micro-batches take unequal times, by what their documents are like and by what
    the host does beside. So every rank draws its micro-batches' residuals from those that were measured.

    Args:
        line: seconds of a micro-batch of no token, and of each of its tokens.
        residuals: seconds that single micro-batches were off that line.
    """
    accumulation = plan.global_batch_size // (world_size * per_device)
    rows = plan.deal_epoch(0, world_size=world_size, per_device=per_device, accumulation=accumulation)
    seconds = line[0] + line[1] * micro_batch_tokens(rows, layout)
    if world_size > 1 and residuals:
        times = -(-DRAWS // len(seconds))
        seconds = seconds + np.random.default_rng(0).choice(residuals, (times, *seconds.shape))
    return seconds.sum(axis=-2).max(axis=-1).reshape(-1, len(rows)).mean(axis=0)


# --- what a measurement is of ---------------------------------------------------------------------------------------


def facts(job: Job) -> dict[str, Any]:
    """All that decides how fast a job's micro-batches are, and how much memory they need."""
    import torch

    from finetune.engine.model import resolve_dtype

    config = job.config
    found = {f"model.{key}": value for key, value in asdict(config.model).items()}
    if not config.model.full_finetuning:
        found |= {f"lora.{key}": value for key, value in asdict(config.lora).items()}
    found |= {f"training.{key}": value for key, value in config.training.extra.items()}
    found |= {
        "the size of the model": [job.size.matmul_parameters, job.size.trainable_parameters, job.size.layers],
        "data": job.data.fingerprint,
        "tokens per pack": job.layout.packs.pack_length,
        "training.per_device_train_batch_size": job.batch.per_device,
        "training.global_batch_size": job.batch.global_batch_size,
        "training.optim": config.training.optim,
        "training.gradient_checkpointing": config.training.gradient_checkpointing,
        "clipping": config.training.max_grad_norm > 0,
        "dtype": str(resolve_dtype(config, job.stack)).removeprefix("torch."),
        "backend": job.stack.backend,
        "patches": sorted(verdict.name for verdict in job.stack.patches if verdict.applied),
        "device": job.hardware.name,
        "script": job.hooks.identity() if job.hooks.script else None,
        "CPU threads per process": torch.get_num_threads() if job.stack.device == "cpu" else None,
        "versions": bootstrap.versions(),
    }
    return json.loads(json.dumps(found, default=str))


def bucket_limits(extra: dict[str, Any]) -> tuple[int, int]:
    """(cap, first) of DDP's buckets in bytes. A cap that is given is that of the first bucket too (torch's
    BucketCapacityConfig); accelerate passes it on where it is another than the default."""
    cap = int(extra.get("ddp_bucket_cap_mb") or 0) * MIB
    return (cap, cap) if cap not in (0, BUCKET_BYTES) else (BUCKET_BYTES, FIRST_BUCKET_BYTES)


def folder() -> Path:
    """Where measurements are kept."""
    return bootstrap.cache_folder() / "measurements"


def digest(found: dict[str, Any]) -> str:
    """Key of facts."""
    return hashlib.blake2b(json.dumps(found, sort_keys=True).encode(), digest_size=12).hexdigest()


def keep(measurement: Measurement) -> Path:
    """Write one into the cache, over an older one of the same job."""
    path = folder() / f"job-{digest(measurement.facts)}.json"
    write_json(path, measurement.to_dict())
    return path


def find(wanted: dict[str, Any]) -> tuple[Measurement | None, str]:
    """The measurement of these facts, and its file; or None, and why: what differs in the nearest one."""
    path = folder() / f"job-{digest(wanted)}.json"
    if (content := _read(path)) is not None:
        return Measurement.from_dict(content), str(path)
    others = [content["facts"] for path in folder().glob("job-*.json") if (content := _read(path))]
    same_model = [other for other in others if _model(other) == _model(wanted)]
    if not same_model:
        return None, "no dry run of this model was measured on this machine (`--dry-run` measures)"
    names = min((_differing(other, wanted) for other in same_model), key=len)
    return None, f"the nearest dry run differs in: {', '.join(names)}"


def _model(found: dict[str, Any]) -> Any:
    return found.get("model.model_name_or_path")


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _read(path: Path) -> dict[str, Any] | None:
    """A measurement file; None where it is missing, damaged or of another version."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        Measurement.from_dict(content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return content


# --- communication --------------------------------------------------------------------------------------------------


# Variables of NCCL that decide what a collective costs: a curve speaks for runs with the same values.
COSTLY = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE")


def comm_file(world_size: int, backend: str, device: str, environment: Mapping[str, str]) -> Path:
    """Where the collectives of so many ranks on such devices, in such an environment, are kept."""
    deciding = [f"{name}={environment[name]}" for name in COSTLY if name in environment] if backend == "nccl" else []
    name = re.sub(r"[^A-Za-z0-9]+", "-", " ".join([device, *deciding])).strip("-")
    return folder() / f"comm-{backend}-{name}-{world_size}.json"


def keep_comm(measured: dict[str, Any], device: str) -> Path:
    """Write what `bench comm` measured on devices of this name into the cache."""
    path = comm_file(measured["world_size"], measured["backend"], device, measured["environment"])
    write_json(path, measured)
    return path


def find_comm(world_size: int, backend: str, device: str, environment: Mapping[str, str]) -> tuple[Curve | None, str]:
    """The all-reduce curve of ranks with this environment, and its file; or None and why."""
    path = comm_file(world_size, backend, device, environment)
    if not path.is_file():
        same = [f"{name}={environment[name]}" for name in COSTLY if name in environment]
        return None, (
            f"no all-reduce of {world_size} ranks was measured on this machine with {' '.join([backend, *same])} "
            "(`finetune bench comm` does)"
        )
    try:
        return read_comm(path)[world_size], str(path)
    except (UserError, KeyError):
        return None, f"{path} cannot be read"


def read_comm(path: Path) -> dict[int, Curve]:
    """The all-reduce curve of each world size in a file of `bench comm --json`: one measurement, or a list of them
    (also under the key `runs`).

    Raises:
        UserError: it is no such file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        # Of one world size with several settings the first counts: those that are advised.
        return {int(one["world_size"]): all_reduce_curve(one) for one in reversed(comm_runs(content))}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{path} is no result of `finetune bench comm --json` that can be read ({type(error).__name__}: {error}). "
            "Measure again, or leave --comm out."
        ) from None


def comm_runs(content: Any) -> Sequence[dict[str, Any]]:
    """The measurements of single world sizes in what `bench comm` wrote.

    Raises KeyError or TypeError where there are none."""
    if isinstance(content, list):
        return content
    return content["runs"] if "runs" in content else [content]
