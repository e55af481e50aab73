"""`finetune advise --model dense-258k`: the dense models of the published study, which train without this package."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace

from finetune.bench.study import command as study
from finetune.errors import UserError
from finetune.measure.predict import Gradients, Work
from finetune.runtime.machine.hardware import Hardware
from finetune.runtime.types import JsonObject

NAMES = {f"dense-{model.name.lower()}": model for model in study.MODELS}
STEPS = 100_000  # assumed for hours and cost, since the model comes without data
EFFORT = Namespace(runs=5, steps=100)


@dataclass(frozen=True, kw_only=True)
class Dense:
    """One of the study's models at one global batch."""

    model: study.Model
    global_batch_size: int

    @property
    def gradients(self) -> Gradients:
        """float32 weights and biases of each layer, under stock DDP."""
        widths = self.model.widths
        sizes = [
            4 * size for before, after in zip(widths, widths[1:], strict=False) for size in (before * after, after)
        ]
        return Gradients(sizes=tuple(sizes))


def choose_model(name: str, global_batch_size: int | None) -> Dense:
    """The model with this name and global batch size; if none is given, the largest that the study has for it.

    Raises:
        UserError: unknown model.
    """
    if name.lower() not in NAMES:
        raise UserError(f"--model: unknown dense model: {name}. The study has {', '.join(NAMES)}.")
    model = NAMES[name.lower()]
    return Dense(model=model, global_batch_size=global_batch_size or max(model.batches))


def candidates(dense: Dense, world_sizes: Sequence[int], machine: Hardware) -> dict[int, Work | str]:
    """Measure one device with each world size's share of the batch. Shares of several ranks run inside DDP, whose hooks
    take much of the host's time in steps this short."""
    held = [world for world in world_sizes if dense.global_batch_size % world == 0]
    batch = dense.global_batch_size
    found: dict[int, Work | str] = {
        world: f"the global batch of {batch} does not divide exactly over {world} devices" for world in world_sizes
    }
    for ddp in (False, True):
        shares = {world: dense.global_batch_size // world for world in held if (world > 1) is ddp}
        if shares:
            models = [replace(dense.model, batches=tuple(shares.values()))]
            measured = study.measure(models, 1, {}, EFFORT, machine, ddp=ddp)
            for world, share in shares.items():
                found[world] = work(measured[dense.model.name, share], dense, share, machine, ddp=ddp)
    return found


def work(result: JsonObject, dense: Dense, share: int, machine: Hardware, *, ddp: bool) -> Work:
    """A case of the study on one device. Its phases were timed in a separate run, so they are scaled to the step time.
    DDP's buckets are subtracted from the memory, because `predict` adds them."""
    step, parts = result["step_seconds"]["median"], result["ranks"][0]["seconds"]
    medians = {name: parts[name]["median"] for name in ("forward", "backward", "optimizer", "other")}
    scale = step / sum(medians.values())
    compute = medians["forward"] + medians["backward"]
    return Work(
        per_device=share,
        accumulation=1,
        compute_seconds=scale * compute,
        backward_share=medians["backward"] / compute,
        data_seconds=0.0,
        optimizer_seconds=scale * medians["optimizer"],
        other_seconds=scale * medians["other"],
        tokens=float(dense.global_batch_size),
        steps=float(STEPS),
        start_up_seconds=0.0,
        gradients=dense.gradients,
        peak_memory_bytes=result["ranks"][0]["memory_gib"] * 2**30 - ddp * sum(dense.gradients.sizes),
        memory_bytes=None if machine.memory_gib is None else machine.memory_gib * 2**30,
    )
