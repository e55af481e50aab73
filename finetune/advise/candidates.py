"""What `advise` measures: the given configuration, other settings on one device, and the all-reduce of several."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from finetune.advise.verdict import LEAST_GAIN
from finetune.bench import comm
from finetune.config import Config, resolve_batch
from finetune.config.arguments import why_not_in_script
from finetune.config.batch import fewest_ranks
from finetune.config.load import FINETUNE
from finetune.config.rules import Mode
from finetune.errors import RunError, UserError
from finetune.measure import measurements, subprocess_dry_run
from finetune.measure.measurements import Measurement
from finetune.measure.predict import Curve, all_reduce_curve, predict
from finetune.runtime.command import console
from finetune.runtime.machine import cpu_threads, nccl
from finetune.runtime.machine.hardware import Hardware
from finetune.runtime.types import JsonObject
from finetune.text import counted

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
    fits_with: tuple[str, ...] = ()  # settings of one with which the longest row fits, of a job that does not fit


@dataclass(kw_only=True)
class DryRunner:
    """Measures settings, each once: dry runs in separate processes on the first device.

    arguments: settings as `--section.key value`
    cpu_cores: of a CPU run, whose ranks share the cores; None on GPUs
    script:    and its arguments; empty for a configuration
    devices:   of the launch whose global batch the script takes
    """

    arguments: list[str]
    cpu_cores: int | None = None
    script: list[str] = field(default_factory=list)
    devices: int = 1
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
            words = [
                "--devices",
                str(self.devices),
                *every,
                self.script[0],
                "--",
                *self.script[1:],
                *self.flags(arguments),
            ]
        with console().status(f"dry run {' '.join(self.flags(extra))}"):
            return parse_report(subprocess_dry_run.run(target, words, on_gpu=self.cpu_cores is None, ranks=sharing))

    def flags(self, arguments: Sequence[str]) -> list[str]:
        """Settings as the user gives them to what is measured."""
        if not self.script:
            return list(arguments)
        pairs = zip(arguments[::2], arguments[1::2], strict=True)
        return [word for flag, value in pairs for word in (FINETUNE, f"{flag.removeprefix('--')}={value}")]

    def applicable(self, changes: Sequence[Change]) -> list[Change]:
        """The changes that can be given to what is measured: a script decides the others in code."""
        if not self.script:
            return list(changes)
        found = []
        for one in changes:
            pairs = zip(one.arguments[::2], one.arguments[1::2], strict=True)
            # Packs are as long as rows; Unsloth's own checkpointing is the loader's.
            kept = [(flag, value) for flag, value in pairs if why_not_in_script(flag.removeprefix("--")) is None]
            words = tuple(word for flag, value in kept for word in (flag, value.replace("unsloth", "true")))
            if kept and kept[0][0] == one.arguments[0]:
                found.append(replace(one, arguments=words))
        return found


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
        fits_with=tuple(report.get("fits_with") or ()),
    )


def measure_curves(
    world_sizes: Sequence[int],
    machine: Hardware,
    sizes: Sequence[int],
    collectives: Sequence[str] = ("all_reduce",),
) -> tuple[dict[int, tuple[Curve | None, str]], float]:
    """The all-reduce of each world size above one, and the seconds that several ranks take to connect. The measurements
    are cached, for scoring runs."""
    environment = {one.name: one.value for one in nccl.recommend_settings(machine)}
    found: dict[int, tuple[Curve | None, str]] = {}
    connecting = 0.0
    # gloo takes seconds for large messages, which this job never sends.
    usual = [size for size in comm.SIZES if machine.device == "cuda" or size <= 4 * max(sizes)]
    for world in [world for world in world_sizes if world > 1]:
        try:
            if not connecting:
                began = time.monotonic()
                comm.measure(world, [4], 1, 1, environment, warm_up=0, collectives=("all_reduce",), machine=machine)
                connecting = time.monotonic() - began
            measured = comm.measure(
                world,
                sorted({*usual, *sizes}),
                environment=environment,
                collectives=collectives,
                machine=machine,
                **EFFORT,
            )
        except RunError as error:
            found[world] = None, f"its all-reduce could not be measured: {error}"
            continue
        kept = measurements.save_comm(measured, machine.name)
        found[world] = all_reduce_curve(measured), str(kept)
    return found, connecting


# --- settings on one device -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Change:
    """Other settings, and whether they train the same model."""

    name: str
    arguments: tuple[str, ...]
    same_result: bool


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """A measured change: its throughput on one device, relative to the given settings."""

    change: Change
    factor: float


def changes(config: Config, base: DryRunResult, on_cpu: bool) -> list[Change]:
    """Changes that may be faster on one device."""
    found = []
    if not config.data.packing:
        found.append(Change(name="packing", arguments=("--data.packing", "true"), same_result=False))
    if config.model.load_in_4bit:
        found.append(
            Change(name="16 bits instead of 4", arguments=("--model.load_in_4bit", "false"), same_result=False)
        )
    model = config.model
    if not (on_cpu or model.full_finetuning or model.load_in_4bit or model.load_in_8bit or model.load_in_fp8):
        from finetune.engine.kernels.fp8 import COST  # imports torch

        arguments = ("--model.load_in_fp8", "true")
        found.append(Change(name=f"FP8 weights ({COST})", arguments=arguments, same_result=False))
    if base.longest_rows is not None:
        found += faster_modes(base.longest_rows)
    elif config.training.gradient_checkpointing:
        arguments = ("--training.gradient_checkpointing", "false")
        found.append(Change(name="no checkpointing", arguments=arguments, same_result=True))
    for size in other_micro_batches(config, base):
        arguments = (PER_DEVICE, str(size))
        found.append(Change(name=f"{counted(size, 'row')} at a time", arguments=arguments, same_result=True))
    return found


def faster_modes(longest_rows: JsonObject) -> list[Change]:
    """The way to keep activations that is predicted to be the fastest of those that hold the job, if it is not the
    job's own."""
    own = {name: longest_rows["own"][name] for name in Mode.__dataclass_fields__}
    fitting = [one for one in longest_rows["modes"] if one["fits"]]
    best = max(fitting, key=lambda one: one["predicted_tokens_per_second"], default=None)
    if best is None or best["mode"] == own:
        return []
    mode = Mode(**best["mode"])
    return [Change(name=mode.text, arguments=tuple(mode.flags()), same_result=True)]


def other_micro_batches(config: Config, base: DryRunResult) -> list[int]:
    """The size that the dry run's search recommends, or twice the present size if there is no memory limit (CPU); and
    half the present size. Only those that divide the global batch exactly and have not been measured."""
    assert base.measured is not None
    now, share = base.measured.per_device, base.measured.global_batch_size
    if config.training.gradient_accumulation_steps is not None:
        return []
    sizes = [base.recommended or 2 * now, now // 2]
    return [size for size in sizes if size and size != now and share % size == 0]


def improvements(config: Config, bench: DryRunner, base: DryRunResult) -> list[Improvement]:
    """The changes that make one device at least 3 % faster, the best first."""
    found = []
    before = speed(base.measured)
    for change in bench.applicable(changes(config, base, bench.cpu_cores is not None)):
        measured = bench.try_out(change.arguments).measured
        if measured is None or (change.name == "packing" and measured.facts["tokens per pack"] is None):
            continue
        factor = speed(measured) / before
        if factor >= LEAST_GAIN:
            found.append(Improvement(change=change, factor=factor))
    found.sort(key=lambda one: -one.factor)
    # Of two changes of the same setting, keep the better.
    return [one for place, one in enumerate(found) if one.change.arguments[0] not in _settings(found[:place])]


def _settings(found: Sequence[Improvement]) -> set[str]:
    return {one.change.arguments[0] for one in found}


def speed(measured: Measurement | None) -> float:
    """Tokens per second of one device, without communication."""
    assert measured is not None
    return predict(replace(measured.work(measured.shared_by), exchanges=()), 1, None).tokens_per_second


def choose_changes(bench: DryRunner, found: Sequence[Improvement]) -> tuple[str, ...]:
    """The faster settings that train the same model: all of them if they are fastest together, else the best one."""
    same = [one.change.arguments for one in found if one.change.same_result]
    together = tuple(word for arguments in same for word in arguments)
    if len(same) < 2:
        return together
    both = bench.try_out(together).measured
    alone = bench.try_out(same[0]).measured
    return together if both is not None and speed(both) >= speed(alone) else same[0]


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
    config: Config, bench: DryRunner, base: Measurement, faster: tuple[str, ...], world_sizes: Sequence[int]
) -> dict[int, Measurement | str]:
    """One device's measurement with the micro-batch size of each world size; or the reason why there is none.

    Args:
        faster: the settings that `choose_changes` chose.
    """
    chosen, others = split_size(faster)
    if bench.script:  # its own size is the most that a rank holds at once
        chosen = chosen or base.per_device
    found: dict[int, Measurement | str] = {}
    for world in world_sizes:
        if world < (fewest := fewest_ranks(config.training)):
            found[world] = f"the job runs on {fewest} or more"
            continue
        try:
            size = micro_batch_size(config, world, chosen)
        except UserError as error:
            why = str(error).splitlines()[0].rstrip(".")
            found[world] = f"the global batch does not fit {counted(world, 'device')}: {why}"
            continue
        same_device = world == 1 or bench.cpu_cores is None  # ranks on a CPU share its cores
        if same_device and not others and size == base.per_device:
            found[world] = base
            continue
        result = bench.try_out([*others, PER_DEVICE, str(size)], ranks=world)
        found[world] = result.measured or f"its dry run failed: {result.reason}"
    return found


def split_size(arguments: Sequence[str]) -> tuple[int | None, list[str]]:
    """The micro-batch size among the arguments (None if it is not set), and the other arguments."""
    if PER_DEVICE not in arguments:
        return None, list(arguments)
    place = list(arguments).index(PER_DEVICE)
    return int(arguments[place + 1]), [*arguments[:place], *arguments[place + 2 :]]
