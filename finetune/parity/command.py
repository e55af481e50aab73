"""`finetune parity`: does the number of ranks change the result? Compares the same steps on several world sizes.

Runs the first optimizer steps of the user's configuration on one rank (which accumulates what several ranks share) and
on each requested world size, in separate processes, and compares the first gradient, the losses, the held-out loss
and the trained weights. Clipping and the learning-rate schedule are off: clipping would hide a gradient that is off
by a factor.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from finetune.config import load, resolve_batch
from finetune.errors import RunError, UserError
from finetune.runtime import launch_lines, subprocesses
from finetune.runtime.command import DONE, FAILED, console, print_line, run_with_options
from finetune.runtime.options import Options, count, counts

PURPOSE = (
    "Check that training your configuration gives the same result on any number of GPUs: run its first optimizer steps"
    " on each world size and compare gradients, losses and weights."
)
NOTES = "Exit code 0: equal within tolerance, 1: not equal, 2: bad input."


def own_options() -> Options:
    """The options of this command."""
    found = Options("parity", PURPOSE, notes=NOTES)
    ranks = "numbers of ranks to compare (gloo on a CPU, NCCL on GPUs); the first is the reference"
    found.add("--world-sizes", counts, "1,2", f"{ranks} (default: 1,2)", [1, 2])
    found.add("--steps", count, "N", "optimizer steps of each run (default: %(default)s)", 4)
    found.add("--without", str, "NAME,...", "patches to leave out, or `all`: shows the effect of each", "")
    return found


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far a run may be from the reference. Sums taken in a different order differ by the rounding of their
    type: 2^-24 for float32, 2^-9 for bfloat16, times the square root of some thousands of terms."""

    ratio: float  # of the first gradient's norm, and of every step's, from 1
    cosine: float  # of the gradient, at least
    loss: float  # relative, per step and held out
    weights: float  # norm of the difference over norm


WORST_SHOWN = 3  # tensors named if a gradient differs
PIECE = 2**24  # elements compared at a time: 128 MiB in float64

TOLERANCES = {
    "float32": Tolerance(ratio=1e-4, cosine=0.99999, loss=1e-5, weights=1e-4),
    "bfloat16": Tolerance(ratio=5e-3, cosine=0.999, loss=1e-3, weights=2e-2),
    "float16": Tolerance(ratio=5e-3, cosine=0.999, loss=1e-3, weights=2e-2),
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One world size against the reference."""

    world_size: int
    ratio: float
    cosine: float
    norm: float  # largest relative difference of a step's gradient norm
    loss: float
    eval_loss: float | None
    weights: float
    tensors: tuple[tuple[str, float, float], ...]  # each one's gradient, the worst first: name, ratio, cosine
    failures: tuple[str, ...]  # descriptions of what is out of tolerance


def main(argv: list[str] | None = None) -> int:
    """Compare world sizes on a configuration. Returns the exit code."""
    return run_with_options(own_options().format_help(), argv, run)


def run(argv: list[str]) -> int:
    """Run all world sizes and compare them.

    Raises:
        UserError: bad options, configuration or data.
        RunError: one of the runs failed.
    """
    options, rest = own_options().split(argv)
    config = load(rest, command="parity")
    worlds, steps = options.world_sizes, options.steps
    if len(worlds) < 2:
        raise UserError(
            f"--world-sizes: expected two or more to compare, got {worlds[0]}. Add one, such as 1,{worlds[0]}."
        )
    for world in worlds:
        if not config.demo:
            resolve_batch(config.training, world, config.data)
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        runs = {world: start(world, Path(folder) / str(world), steps, options.without, rest) for world in worlds}
        found = [compare(Path(folder) / str(worlds[0]), Path(folder) / str(world), world) for world in worlds[1:]]
    print_comparison(runs[worlds[0]], found)
    proven = not any(one.failures for one in found)
    if options.json:
        from finetune.runtime.files import write_json

        stack = {name: runs[worlds[0]][name] for name in ("backend", "dtype", "versions", "hardware", "patches")}
        verdict = {"proven": proven, "reference": worlds[0], "steps": steps, "found": [vars(one) for one in found]}
        write_json(options.json, verdict | stack)
    return DONE if proven else FAILED


def start(world: int, out: Path, steps: int, without: str, arguments: list[str]) -> dict[str, Any]:
    """Run one world size to its end and return its run.json.

    Raises:
        UserError, RunError: the error of the run that failed.
    """
    out.mkdir(parents=True)
    command = [*launch_lines.ranks(world), "-m", "finetune.parity.run", str(out), str(steps), without, *arguments]
    env = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with console().status(f"{steps} steps on {world} rank{'s' if world > 1 else ''}"):
        done = subprocesses.run(command, env=env)
    if done.returncode:
        message = subprocesses.first_error(done.stderr + done.stdout)
        kind = UserError if done.returncode == 2 or message else RunError
        raise kind(f"the run on {world} ranks failed: {message or (done.stdout + done.stderr)[-3000:]}")
    return json.loads((out / "run.json").read_text())


@dataclass(frozen=True, kw_only=True)
class Products:
    """Inner products of two runs' tensors: first * first, second * second, first * second, and |first - second|^2."""

    first: float = 0.0
    second: float = 0.0
    both: float = 0.0
    apart: float = 0.0
    dtype: str = ""  # of the first, as torch names it

    @property
    def ratio(self) -> float:
        """Norm of the second over that of the first; 1 if both are zero, like the A matrix of an adapter in the
        first step."""
        if self.first == 0:
            return 1.0 if self.second == 0 else math.inf
        return math.sqrt(self.second / self.first)

    @property
    def cosine(self) -> float:
        if self.first == self.second == 0:
            return 1.0
        return self.both / math.sqrt(self.first * self.second) if self.first and self.second else 0.0

    @property
    def distance(self) -> float:
        """Norm of the difference over the norm of the first."""
        if self.apart == 0:
            return 0.0
        return math.sqrt(self.apart / self.first) if self.first else math.inf

    @classmethod
    def of(cls, a: Any, b: Any) -> Products:
        """Of two vectors."""
        apart = a - b
        return cls(first=float(a @ a), second=float(b @ b), both=float(a @ b), apart=float(apart @ apart))

    @classmethod
    def sum(cls, each: Iterable[Products]) -> Products:
        """The products of all tensors concatenated."""
        each = list(each)
        return cls(
            first=sum(one.first for one in each),
            second=sum(one.second for one in each),
            both=sum(one.both for one in each),
            apart=sum(one.apart for one in each),
        )


def products(reference: Path, other: Path) -> dict[str, Products]:
    """Per tensor, in float64, one piece at a time: a host may not hold all weights of a large model in float64.

    Raises:
        RunError: the two files hold different tensors.
    """
    from safetensors import safe_open

    found = {}
    with safe_open(reference, "pt") as first, safe_open(other, "pt") as second:
        if set(first.keys()) != set(second.keys()):
            names = sorted(set(first.keys()) ^ set(second.keys()))[:5]
            raise RunError(f"the runs trained different tensors and cannot be compared: {', '.join(names)}")
        for name in sorted(first.keys()):
            one, two = first.get_tensor(name).flatten(), second.get_tensor(name).flatten()
            pieces = [
                Products.of(a.double(), b.double()) for a, b in zip(one.split(PIECE), two.split(PIECE), strict=True)
            ]
            found[name] = replace(Products.sum(pieces), dtype=str(one.dtype).removeprefix("torch."))
    return found


def compare(reference: Path, other: Path, world: int) -> Comparison:
    """Compare two runs by the files that they wrote."""
    import numpy as np
    from safetensors.torch import load_file

    folders = (reference, other)
    one, two = (json.loads((folder / "run.json").read_text()) for folder in folders)
    gradients, weights = (
        products(reference / f"{name}.safetensors", other / f"{name}.safetensors") for name in ("gradient", "weights")
    )
    norms = [load_file(folder / "norms.safetensors")["norms"].double() for folder in folders]
    # The coarsest type in which sums are taken: that of autocast, which only GPUs use, and that of the gradients.
    types = {product.dtype for product in gradients.values()}
    types |= {one["dtype"]} if one["hardware"]["device"] != "cpu" else set()
    allowed = max((TOLERANCES[name] for name in types if name in TOLERANCES), key=lambda tolerance: tolerance.ratio)

    whole = Products.sum(gradients.values())
    ratio, cosine = whole.ratio, whole.cosine
    floor = 1e-12 * whole.first  # negligible gradients (norm below 1e-6 of the total) are not compared
    each = [(key, found.ratio, found.cosine) for key, found in gradients.items() if found.first > floor]
    tensors = sorted(each, key=lambda item: min(item[2], 1 - abs(item[1] - 1)))
    norm = float(((norms[1] - norms[0]).abs() / norms[0]).max())
    # np.max propagates NaN; Python's max may ignore it.
    loss = float(np.max([abs(a - b) / abs(a) for a, b in zip(one["losses"], two["losses"], strict=True)]))
    early, late = one["eval_loss_after"], two["eval_loss_after"]
    eval_loss = None if early is None else abs(early - late) / abs(early)
    weights_apart = Products.sum(weights.values()).distance

    failures = []  # `not ... <=`: NaN fails as well
    if not abs(ratio - 1) <= allowed.ratio:
        failures.append(f"the gradient is {ratio:.4f} times the reference's (allowed 1 +- {allowed.ratio:g})")
    if not cosine >= allowed.cosine:
        failures.append(f"the gradient has a different direction: cosine {cosine:.6f} (at least {allowed.cosine})")
    if not norm <= allowed.ratio:
        failures.append(f"a step's gradient norm differs by {norm:.1e} (allowed {allowed.ratio:g})")
    if not loss <= allowed.loss:
        failures.append(f"a step's loss differs by {loss:.1e} (allowed {allowed.loss:g})")
    if eval_loss is not None and not eval_loss <= allowed.loss:
        failures.append(f"the held-out loss differs by {eval_loss:.1e} (allowed {allowed.loss:g})")
    if not weights_apart <= allowed.weights:
        failures.append(f"the trained weights differ by {weights_apart:.1e} (allowed {allowed.weights:g})")
    return Comparison(
        world_size=world,
        ratio=ratio,
        cosine=cosine,
        norm=norm,
        loss=loss,
        eval_loss=eval_loss,
        weights=weights_apart,
        tensors=tuple(tensors),
        failures=tuple(failures),
    )


def print_comparison(reference: dict[str, Any], found: list[Comparison]) -> None:
    """Print a table, and what is out of tolerance."""
    shown = Table(title=f"Against {reference['world_size']} rank(s), {reference['steps']} steps", title_justify="left")
    for column in ("ranks", "gradient ratio - 1", "1 - cosine", "norm", "loss", "held-out loss", "weights", ""):
        shown.add_column(column, justify="right")
    for one in found:
        held_out = "-" if one.eval_loss is None else f"{one.eval_loss:.1e}"
        verdict = "not proven" if one.failures else "equal"
        gradient = (f"{one.ratio - 1:+.1e}", f"{max(1 - one.cosine, 0.0):.1e}", f"{one.norm:.1e}")
        shown.add_row(str(one.world_size), *gradient, f"{one.loss:.1e}", held_out, f"{one.weights:.1e}", verdict)
    console().print(shown)
    for one in found:
        for failure in one.failures:
            print_line(f"{one.world_size} ranks: {failure}", style="red")
        if one.failures:
            for name, ratio, cosine in one.tensors[:WORST_SHOWN]:
                print_line(f"  {name}: ratio {ratio:.4f}, cosine {cosine:.6f}")


if __name__ == "__main__":
    raise SystemExit(main())
