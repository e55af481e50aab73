"""Predicts the dense models of the study on several devices from one, as `finetune advise` predicts a configuration.

python -m benchmarks.study.advise 258K --batch 64
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.study import command as study
from finetune.advise import command, report, verdict
from finetune.advise.machine import devices_here
from finetune.advise.verdict import Row
from finetune.errors import UserError
from finetune.measure.predict import Gradients, Work
from finetune.runtime.command import DONE, run_with_options
from finetune.runtime.files import write_json
from finetune.runtime.machine.hardware import Hardware
from finetune.runtime.options import Options, count, counts, path

NAMES = {model.name: model for model in study.MODELS}
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


def chosen(name: str, global_batch_size: int | None) -> Dense:
    """The model with this name and global batch size; if none is given, the largest that the study has for it.

    Raises:
        UserError: unknown model.
    """
    if name not in NAMES:
        raise UserError(f"unknown model: {name}. The study has {', '.join(NAMES)}.")
    model = NAMES[name]
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


def work(result: dict[str, Any], dense: Dense, share: int, machine: Hardware, *, ddp: bool) -> Work:
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


# These models took 1.6 to 3.5 ms per step on H200s, with the GPU busy 12 to 27 % of the time.
SHORT_SECONDS = 5e-3


def short_step(found: Sequence[Row], machine: Hardware) -> list[str]:
    """A note if a GPU's step is so short that it measures the host; none otherwise."""
    one = found[0].prediction
    if machine.device != "cuda" or one is None or one.step_seconds >= SHORT_SECONDS:
        return []
    return [
        f"A step of {1e3 * one.step_seconds:.1f} ms is the host launching kernels. In another process or on another "
        "host of the same kind, such steps differed by 1 to 45% (H200s, benchmarks/results): trust the verdict more "
        "than the milliseconds."
    ]


def main(argv: list[str] | None = None) -> int:
    """Advise on one model. Returns the exit code."""
    return run_with_options(own_options().format_help(), argv, run)


def own_options() -> Options:
    """The options of this command."""
    found = Options("", "How many devices are worth it for a dense model of the study.", configuration=False)
    found.prog = "python -m benchmarks.study.advise"
    found.usage = f"{found.prog} 258K|6.9M [options]"
    found.add_argument("model", help="258K or 6.9M")
    found.add("--batch", count, "N", "global batch size (default: the largest of the study)")
    found.add("--world-sizes", counts, "1,2,4,8", "numbers of devices to predict (default: up to the number here)")
    found.add("--comm", path, "FILE.json", "read the all-reduce from an earlier `finetune bench comm --json`")
    found.set_defaults(price_per_gpu_hour=None, fastest=False)
    return found


def run(argv: list[str]) -> int:
    """Measure, predict, print and write. There is no launch line.

    Raises:
        UserError: bad options.
        RunError: a rank failed.
    """
    options, _ = own_options().split(argv)
    job = chosen(options.model, options.batch)
    if options.world_sizes is not None:
        options.world_sizes = sorted({1, *options.world_sizes})  # all are compared with one device
    machine, given = command.inspect_machine(options)
    found = candidates(job, command.world_sizes(options, devices_here(machine), given), machine)
    rows, best, connecting = command.compare(found, options, machine, given)
    advice = {
        "kind": "advice",
        "model": options.model,
        "global_batch_size": job.global_batch_size,
        "world_size": best.world_size,
        "reason": verdict.decision_sentence(best, rows),
        "device": machine.name,
        "launch": None,
        "rows": [row.to_dict() for row in rows],
        "improvements": [],
        "study2025": report.ruling(job.model.parameters, job.global_batch_size, rows, machine),
        "notes": [
            f"{options.model}: {job.model.parameters:,} parameters, a global batch of {job.global_batch_size}; a token "
            f"is a sample, and a run has {STEPS:,} steps. Each step sends "
            f"{sum(job.gradients.sizes) / 2**20:,.1f} MiB of gradients.",
            *short_step(rows, machine),
        ],
        "start_up_of_ranks_seconds": connecting,
    }
    report.print_advice(advice, rows, best, priced=False)
    if options.json:
        write_json(options.json, advice)
    return DONE


if __name__ == "__main__":
    raise SystemExit(main())
