"""`finetune parity`: does the world size change the result, or sharding? Runs the same steps on each and compares.

Runs the first optimizer steps of the user's configuration or script on each world size, by default one rank (which
accumulates what two ranks share) and two, in separate processes. Compares the first gradient, the losses, the held-out
loss and the trained weights. With `--strategies ddp,shard,cp,shard+cp`, world sizes above one run with each strategy,
and all runs with the transformers backend, unless the configuration names one. With cp, ranks share each row: as many
as `training.context_parallel` says, or all. Gradient clipping and the learning-rate schedule are off: clipping would
hide a gradient that is wrong by a factor.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich import box
from rich.table import Table

from finetune.config import Config, ConfigError, TrainingConfig, resolve_batch, with_fixed_batch
from finetune.config.rules import context_parallelism, sharding, transformers_only
from finetune.errors import RunError, UserError
from finetune.runtime import launch_lines, scripts, subprocesses
from finetune.runtime.command import DONE, FAILED, console, load_config, print_line, run_with_options
from finetune.runtime.options import Options, count, counts, names
from finetune.runtime.types import JsonObject
from finetune.text import counted

if TYPE_CHECKING:
    import torch

PURPOSE = (
    "Check that your configuration gives the same result on any number of GPUs: run its first optimizer steps on each"
    " world size and compare gradients, losses and weights."
)
NOTES = "Exit code 0: equal within tolerance, 1: not equal, 2: bad input."


def own_options() -> Options:
    """The options of this command."""
    found = Options("parity", PURPOSE, notes=NOTES, script=True)
    ranks = "world sizes to compare (gloo on a CPU, NCCL on GPUs); the first is the reference"
    found.add("--world-sizes", counts, "1,2", f"{ranks} (default: 1,2)", [1, 2])
    strategies = (
        "strategies of world sizes above 1, out of ddp, shard, cp and shard+cp (default: as configured); with cp, all "
        "ranks share each row, or as many as training.context_parallel says"
    )
    found.add("--strategies", names, "NAME,...", strategies, [])
    found.add("--steps", count, "N", "optimizer steps per run (default: %(default)s)", 4)
    found.add("--without", str, "NAME,...", "patches to skip, or `all`, to see their effect", "")
    return found


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far a run may be from the reference. Sums in a different order differ by the rounding of their type, 2^-24
    for float32 and 2^-9 for bfloat16, times the square root of several thousand terms. Once weights differ, every
    16-bit forward pass rounds differently. The bounds for 16 bits are at least 1.7 times the largest differences
    between correct runs of pretrained SmolLM2 (benchmarks/results/2026-11-28-parity-noise-cpu.json)."""

    ratio: float  # distance from 1 of the ratio of the first gradients' norms
    cosine: float  # of the first gradients, at least
    first_loss: float  # relative difference
    norm: float  # relative difference of the gradient norm, per step
    loss: float  # relative difference, per later step and held-out
    weights: float  # norm of the difference over norm


STRATEGIES = ("ddp", "shard", "cp", "shard+cp")
WORST_SHOWN = 3  # tensors printed if a comparison fails
PIECE = 2**24  # elements compared at a time: 128 MiB in float64

IN_16_BITS = Tolerance(ratio=5e-3, cosine=0.998, first_loss=3e-3, norm=3e-2, loss=1e-2, weights=2e-2)
TOLERANCES = {
    "float32": Tolerance(ratio=1e-4, cosine=0.99999, first_loss=1e-5, norm=1e-4, loss=1e-5, weights=1e-4),
    "bfloat16": IN_16_BITS,
    "float16": IN_16_BITS,
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One world size and strategy against the reference."""

    world_size: int
    strategy: str = "ddp"
    ratio: float
    cosine: float
    norm: float  # largest relative difference of a step's gradient norm
    loss: float
    eval_loss: float | None
    weights: float
    tensors: tuple[tuple[str, float, float], ...]  # gradient per tensor, worst first: name, ratio, cosine
    failures: tuple[str, ...]  # one message per figure out of tolerance


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command. Returns the exit code."""
    return run_with_options(own_options().format_help(), argv, run, takes_script=True)


def run(argv: list[str]) -> int:
    """Run all world sizes and strategies and compare them.

    Raises:
        UserError: invalid options, configuration, script or data.
        RunError: one of the runs failed.
    """
    options, rest, script = own_options().split_script(argv)
    most = max(options.world_sizes)  # whose global batch the others have too
    if script:
        scripts.check(script[0])
        backend = "transformers" if set(options.strategies) - {"ddp"} else ""
        cases = _cases(options.world_sizes, options.strategies or ["ddp"], backend)  # its ranks find out what it cannot
    else:
        config = load_config(rest, command="parity")
        config = replace(config, training=with_fixed_batch(config.training, most, config.data))
        cases = configuration_cases(config, options.world_sizes, options.strategies)
    first, arguments = cases[0], [str(most), *(script or rest)]
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        folders = {case: Path(folder) / f"{case.world_size}-{case.strategy}" for case in cases}
        runs = {case: run_case(case, out, options.steps, options.without, arguments) for case, out in folders.items()}
        found = [compare(folders[first], folders[case], case.world_size, case.strategy) for case in cases[1:]]
    print_comparison(runs[first], found)
    proven = not any(one.failures for one in found)
    if options.json:
        from finetune.runtime.files import write_json

        names = ("backend", "dtype", "versions", "hardware", "patches", "adapter_part_kept")
        stack = {name: runs[first][name] for name in names}
        verdict = {"proven": proven, "reference": first.world_size, "reference_strategy": first.strategy}
        verdict |= {"steps": options.steps, "found": [vars(one) for one in found]}
        write_json(options.json, verdict | stack)
    return DONE if proven else FAILED


class Case(NamedTuple):
    """What one run differs in from the others."""

    world_size: int
    strategy: str  # one of STRATEGIES; "ddp" for one rank
    backend: str  # the same for all runs; empty for that of a script


def configuration_cases(config: Config, world_sizes: list[int], strategies: list[str]) -> list[Case]:
    """The runs to compare, the reference first. On one rank there is nothing to shard: it runs once.

    Raises:
        UserError: there are fewer than two, a strategy is unknown, or the configuration cannot be run so.
    """
    strategies = strategies or [_configured(config)]
    backend = config.model.backend
    if any(name != "ddp" for name in strategies) and backend == "auto":  # which only they would take for transformers
        backend = "transformers"
    cases = _cases(world_sizes, strategies, backend)
    problems: dict[str, None] = {}
    for case in cases:
        tried = replace(config, training=with_strategy(config.training, case.world_size, case.strategy))
        found = [
            one for rule in (transformers_only, sharding, context_parallelism) for one in rule(tried, config.given)
        ]
        problems |= dict.fromkeys(f"{', '.join(keys)}: {text}" for keys, text in found)
        if not (config.demo or problems):
            resolve_batch(tried.training, case.world_size, config.data)
    if problems:
        raise ConfigError(problems)
    return cases


def _configured(config: Config) -> str:
    parts = ["shard"] if config.training.strategy == "shard" else []
    parts += ["cp"] if config.training.context_parallel > 1 else []
    return "+".join(parts) or "ddp"


def with_strategy(training: TrainingConfig, world_size: int, strategy: str) -> TrainingConfig:
    """The settings of a run on `world_size` ranks with one of STRATEGIES."""
    shared = training.context_parallel if training.context_parallel > 1 else world_size
    return replace(
        training,
        strategy="shard" if "shard" in strategy else None,
        shard_reduce=training.shard_reduce if "shard" in strategy else "auto",
        context_parallel=shared if "cp" in strategy else 1,
    )


def _cases(world_sizes: list[int], strategies: list[str], backend: str) -> list[Case]:
    if unknown := [name for name in strategies if name not in STRATEGIES]:
        raise UserError(f"--strategies: unknown strategy {unknown[0]!r}. Use some of {', '.join(STRATEGIES)}.")
    pairs = [(size, name if size > 1 else "ddp") for size in world_sizes for name in strategies]
    cases = dict.fromkeys(Case(*pair, backend) for pair in pairs)
    if len(cases) < 2:
        first = world_sizes[0]
        raise UserError(f"--world-sizes: expected two or more to compare, got {first}. Add one, such as 1,{first}.")
    return list(cases)


def run_case(case: Case, out: Path, steps: int, without: str, arguments: list[str]) -> JsonObject:
    """Run one case and return the content of its run.json.

    Args:
        arguments: the last ones of `parity.run`.

    Raises:
        UserError, RunError: the error of the run that failed.
    """
    out.mkdir(parents=True)
    world_size, strategy, backend = case
    program = ["-m", "finetune.parity.run", str(out), str(steps), without, strategy, backend]
    command = [*launch_lines.launch_command(world_size), *program, *arguments]
    env = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with console().status(f"{counted(steps, 'step')} on {counted(world_size, 'rank')}, {strategy}"):
        done = subprocesses.run(command, env=env)
    if done.returncode:
        message = subprocesses.first_error(done.stderr + done.stdout)
        kind = UserError if done.returncode == 2 or message else RunError
        raise kind(f"The run on {counted(world_size, 'rank')} failed: {message or (done.stdout + done.stderr)[-3000:]}")
    return json.loads((out / "run.json").read_text())


@dataclass(frozen=True, kw_only=True)
class Products:
    """Inner products of two runs' tensors; `apart` is the squared norm of their difference."""

    first: float = 0.0
    second: float = 0.0
    both: float = 0.0
    apart: float = 0.0
    dtype: str = ""  # of the first run's tensor, such as "float32"

    @property
    def ratio(self) -> float:
        """Norm of the second over norm of the first; 1 if both are zero, as for the A matrix of an adapter in the first
        step."""
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
    def of(cls, a: torch.Tensor, b: torch.Tensor) -> Products:
        """Products of two vectors."""
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
    """Inner products per tensor of two safetensors files, in float64. Computed piece by piece: the host may lack the
    memory for all weights of a large model in float64.

    Raises:
        RunError: the files hold different tensors.
    """
    from safetensors import safe_open

    found = {}
    with safe_open(reference, "pt") as first, safe_open(other, "pt") as second:
        if set(first.keys()) != set(second.keys()):
            names = sorted(set(first.keys()) ^ set(second.keys()))[:5]
            raise RunError(f"The runs trained different tensors and cannot be compared: {', '.join(names)}.")
        for name in sorted(first.keys()):
            one, two = first.get_tensor(name).flatten(), second.get_tensor(name).flatten()
            pieces = [
                Products.of(a.double(), b.double()) for a, b in zip(one.split(PIECE), two.split(PIECE), strict=True)
            ]
            found[name] = replace(Products.sum(pieces), dtype=str(one.dtype).removeprefix("torch."))
    return found


def compare(reference: Path, other: Path, world_size: int, strategy: str = "ddp") -> Comparison:
    """Compare two runs by the files in their output folders."""
    import numpy as np
    from safetensors.torch import load_file

    folders = (reference, other)
    one, two = (json.loads((folder / "run.json").read_text()) for folder in folders)
    gradients, weights = (
        products(reference / f"{name}.safetensors", other / f"{name}.safetensors") for name in ("gradient", "weights")
    )
    norms = [load_file(folder / "norms.safetensors")["norms"].double() for folder in folders]
    # Tolerances of the coarsest type that sums are taken in: the gradients', and autocast's.
    types = {product.dtype for product in gradients.values()} | {one["dtype"]}
    allowed = max((TOLERANCES[name] for name in types if name in TOLERANCES), key=lambda tolerance: tolerance.ratio)

    total = Products.sum(gradients.values())
    ratio, cosine = total.ratio, total.cosine
    floor = 1e-12 * total.first  # negligible gradients (norm below 1e-6 of the total) are not compared
    each = [(key, found.ratio, found.cosine) for key, found in gradients.items() if found.first > floor]
    tensors = sorted(each, key=lambda item: min(item[2], 1 - abs(item[1] - 1)))
    norm = float(((norms[1] - norms[0]).abs() / norms[0]).max())
    losses = np.array([abs(a - b) / abs(a) for a, b in zip(one["losses"], two["losses"], strict=True)])
    early, late = one["eval_loss_after"], two["eval_loss_after"]
    eval_loss = None if early is None else abs(early - late) / abs(early)
    weights_apart = Products.sum(weights.values()).distance

    failures = []  # `not ... <=`: NaN fails as well
    if not abs(ratio - 1) <= allowed.ratio:
        failures.append(f"the gradient is {ratio:.4f} times the reference's (allowed 1 +- {allowed.ratio:g})")
    if not cosine >= allowed.cosine:
        failures.append(f"the gradient has a different direction: cosine {cosine:.6f} (at least {allowed.cosine})")
    if not norm <= allowed.norm:
        failures.append(f"a step's gradient norm differs by {norm:.1e} (allowed {allowed.norm:g})")
    for step, part, most in (("the first", losses[:1], allowed.first_loss), ("a later", losses[1:], allowed.loss)):
        if not (loss := part.max(initial=0)) <= most:  # NumPy's max propagates NaN; Python's may ignore it
            failures.append(f"{step} step's loss differs by {loss:.1e} (allowed {most:g})")
    if eval_loss is not None and not eval_loss <= allowed.loss:
        failures.append(f"the held-out loss differs by {eval_loss:.1e} (allowed {allowed.loss:g})")
    if not weights_apart <= allowed.weights:
        failures.append(f"the trained weights differ by {weights_apart:.1e} (allowed {allowed.weights:g})")
    return Comparison(
        world_size=world_size,
        strategy=strategy,
        ratio=ratio,
        cosine=cosine,
        norm=norm,
        loss=float(losses.max()),
        eval_loss=eval_loss,
        weights=weights_apart,
        tensors=tuple(tensors),
        failures=tuple(failures),
    )


def print_comparison(reference: JsonObject, found: list[Comparison]) -> None:
    """Print a table of all comparisons, then every failure with the tensors that differ most."""
    sharded = ", sharded," if reference.get("sharding") else ""
    title = (
        f"Compared with {counted(reference['world_size'], 'rank')}{sharded} after {counted(reference['steps'], 'step')}"
    )
    # Fits 80 columns with exponents of three digits: rich would cut figures that do not fit.
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    columns = ("ranks", "gradient\nratio - 1", "1 - cosine", "norm", "loss", "held-out\nloss", "weights", "result")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for one in found:
        held_out = "-" if one.eval_loss is None else f"{one.eval_loss:.1e}"
        verdict = "not equal" if one.failures else "equal"
        gradient = (f"{one.ratio - 1:+.1e}", f"{max(1 - one.cosine, 0.0):.1e}", f"{one.norm:.1e}")
        ranks = str(one.world_size) if one.strategy == "ddp" else f"{one.world_size} {one.strategy}"
        table.add_row(ranks, *gradient, f"{one.loss:.1e}", held_out, f"{one.weights:.1e}", verdict)
    console().print(table)
    if (kept := reference.get("adapter_part_kept")) is not None:
        print_line(f"{kept:.0%} of an adapter's first update is left of its layers' outputs after rounding.")
    for one in found:
        for failure in one.failures:
            print_line(f"{counted(one.world_size, 'rank')}, {one.strategy}: {failure}", style="red")
        if one.failures:
            for name, ratio, cosine in one.tensors[:WORST_SHOWN]:
                print_line(f"  {name}: ratio {ratio:.4f}, cosine {cosine:.6f}")


if __name__ == "__main__":
    raise SystemExit(main())
