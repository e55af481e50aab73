"""What `advise` measures: the given configuration on one device, and the all-reduce of several."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune.bench import comm
from finetune.config import Config, resolve_batch
from finetune.config.load import FINETUNE
from finetune.errors import RunError, UserError
from finetune.measure import measurements, subprocess_dry_run
from finetune.measure.measurements import Measurement
from finetune.measure.predict import Curve, all_reduce_curve
from finetune.runtime.command import console, print_line
from finetune.runtime.machine import cpu_threads, nccl
from finetune.runtime.machine.hardware import Hardware
from finetune.runtime.types import JsonObject
from finetune.text import counted, duration

PER_DEVICE = "--training.per_device_train_batch_size"
EFFORT = {"runs": 3, "steps": 30}  # for the all-reduce: the shape of the curve matters, not its confidence interval


@dataclass(frozen=True, kw_only=True)
class DryRunResult:
    """One dry run: a measurement, or the reason why there is none."""

    measured: Measurement | None
    reason: str | None = None
    recommended: int | None = None  # micro-batch size found by the dry run's search
    full: bool = False  # the device ran out of memory
    master_weights: dict[str, str] | None = None  # how trained weights are kept, and why
    config: JsonObject | None = None  # the resolved configuration, if it is known
    longest_rows: JsonObject | None = None  # each way to keep activations, measured


@dataclass(kw_only=True)
class DryRunner:
    """Measures settings, each once: dry runs in separate processes on the first device.

    arguments: settings as `--section.key value`
    cpu_cores: of a CPU run, whose ranks share the cores; None on GPUs
    script:    and its arguments; empty for a configuration
    devices:   of the launch whose global batch the script takes
    most:      dry runs that there may be
    seconds:   that the first one took
    """

    arguments: list[str]
    cpu_cores: int | None = None
    script: list[str] = field(default_factory=list)
    devices: int = 1
    most: int = 1
    seconds: float = 0.0
    _done: dict[tuple[tuple[str, ...], int], DryRunResult] = field(default_factory=dict)

    def try_out(self, extra: Sequence[str], ranks: int = 1) -> DryRunResult:
        """A dry run with `extra` arguments, as one of `ranks` ranks would run it.

        Raises:
            UserError: the given configuration is invalid. With `extra` this is only the reason of the result.
            RunError: the dry run failed for another reason than memory.
        """
        shared = ranks if self.cpu_cores is not None and cpu_threads.VARIABLE not in os.environ else 1
        key = (*self.arguments, *extra), shared
        if key not in self._done:
            try:
                self._done[key] = self._dry_run(extra, shared)
            except UserError as error:
                if not extra:
                    raise
                self._done[key] = DryRunResult(measured=None, reason=str(error))
        return self._done[key]

    def _dry_run(self, extra: Sequence[str], sharing: int) -> DryRunResult:
        arguments = [*self.arguments, *extra]
        target, words = ["-m", "finetune.train"], ["--dry-run", *arguments]
        every = ["--longest"] if self.cpu_cores is None and not extra else []
        if every:
            target, words = ["-m", "finetune.dryrun"], [*every, *arguments]
        if self.script:
            target = ["-m", "finetune.dryrun"]
            own = [*self.script[1:], *self.flags(arguments)]
            words = ["--devices", str(self.devices), *every, self.script[0], "--", *own]
        what, began = f"Dry run {len(self._done) + 1} of at most {self.most}", time.monotonic()
        lasts = (
            f"the first took {duration(self.seconds)}" if self.seconds else "at most 5 minutes, and loading the model"
        )
        print_line(f"{what} ({lasts}){': ' if extra else ''}{' '.join(self.flags(extra))}")
        with console().status(what):
            found = parse_report(subprocess_dry_run.run(target, words, on_gpu=self.cpu_cores is None, ranks=sharing))
        self.seconds = self.seconds or time.monotonic() - began
        return found

    def flags(self, arguments: Sequence[str]) -> list[str]:
        """Settings as the user gives them to what is measured."""
        if not self.script:
            return list(arguments)
        pairs = zip(arguments[::2], arguments[1::2], strict=True)
        return [word for flag, value in pairs for word in (FINETUNE, f"{flag.removeprefix('--')}={value}")]


def parse_report(report: Mapping[str, Any]) -> DryRunResult:
    """The result of a dry run, from its report."""
    go = report["go"]
    return DryRunResult(
        measured=Measurement.from_dict(report["measurement"]) if go else None,
        reason=None if go else report["reason"],
        recommended=report.get("micro_batch_search", {}).get("recommended") if go else None,
        full=not go and bool(report.get("out_of_memory")),
        master_weights=report.get("master_weights") if go else None,
        config=report.get("config"),
        longest_rows=report.get("longest_rows"),
    )


def measure_curves(
    world_sizes: Sequence[int], machine: Hardware, sizes: Sequence[int]
) -> tuple[dict[int, tuple[Curve | None, str]], float]:
    """The all-reduce of each world size above one, and the seconds that several ranks take to connect. The measurements
    are cached, for scoring runs."""
    environment = {one.name: one.value for one in nccl.recommend_settings(machine)}
    found: dict[int, tuple[Curve | None, str]] = {}
    connecting = 0.0
    # gloo takes seconds for large messages, which this job never sends.
    usual = [size for size in comm.SIZES if machine.device == "cuda" or size <= 4 * max(sizes)]
    several = [world for world in world_sizes if world > 1]
    for number, world in enumerate(several, start=1):
        print_line(f"Communication of {world} devices, {number} of {len(several)}")
        try:
            if not connecting:
                began = time.monotonic()
                comm.measure(world, [4], 1, 1, environment, warm_up=0, collectives=("all_reduce",), machine=machine)
                connecting = time.monotonic() - began
            measured = comm.measure(
                world,
                sorted({*usual, *sizes}),
                environment=environment,
                collectives=("all_reduce",),
                machine=machine,
                **EFFORT,
            )
        except RunError as error:
            found[world] = None, f"its all-reduce could not be measured: {error}"
            continue
        kept = measurements.save_comm(measured, machine.name)
        found[world] = all_reduce_curve(measured), str(kept)
    return found, connecting


def micro_batch_size(config: Config, world: int, most: int | None) -> int:
    """The micro-batch size at a world size: the configured one, or the largest divisor of a rank's share up to `most`.

    Raises:
        UserError: the global batch does not divide exactly.
    """
    batch = resolve_batch(config.training, world, config.data)
    if most is None or config.training.gradient_accumulation_steps is not None:
        return batch.per_device
    share = batch.per_device * batch.accumulation
    return max(size for size in range(1, min(most, share) + 1) if share % size == 0)


def measure_at_world_sizes(
    config: Config, bench: DryRunner, base: Measurement, most: int | None, world_sizes: Sequence[int]
) -> dict[int, Measurement | str]:
    """One device's measurement with the micro-batch size of each world size; or the reason why there is none.

    Args:
        most: rows of a micro-batch, as the dry run's search recommends; None without one.
    """
    if bench.script:  # its own size is the most that a rank holds at once
        most = most or base.per_device
    found: dict[int, Measurement | str] = {}
    for world in world_sizes:
        try:
            size = micro_batch_size(config, world, most)
        except UserError as error:
            why = str(error).splitlines()[0].rstrip(".")
            found[world] = f"the global batch does not fit {counted(world, 'device')}: {why}"
            continue
        same_device = world == 1 or bench.cpu_cores is None  # ranks on a CPU share its cores
        if same_device and size == base.per_device:
            found[world] = base
            continue
        result = bench.try_out([PER_DEVICE, str(size)], ranks=world)
        found[world] = result.measured or f"its dry run failed: {result.reason}"
    return found
