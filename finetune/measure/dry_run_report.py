"""The report of a dry run: go or no-go, the figures, and the command that launches the real run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from finetune.config import Config
from finetune.config.rules import Mode
from finetune.engine.checkpoint import output_folder
from finetune.engine.monitoring.metrics import parameters_text
from finetune.measure import strategy
from finetune.measure.slices import Sharded
from finetune.redact import redact_arguments, redact_tree
from finetune.runtime import launch_lines, scripts
from finetune.runtime.command import console, print_line
from finetune.runtime.files import write_json
from finetune.runtime.machine.hardware import NOTABLE_OUTSIDE_BYTES
from finetune.runtime.options import without_option
from finetune.runtime.types import JsonObject
from finetune.text import counted, duration


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """The result of a dry run. `reason` is None for go."""

    go: bool
    reason: str | None
    measured: JsonObject


def print_report(config: Config, outcome: TrialResult, line: str) -> None:
    """Print go or no-go, with the measurements and the launch line of the real run."""
    if config.training.strategy == "shard":
        print_line(
            "warning: training.strategy is shard, and this dry run measures the whole model on one device, not "
            "slices of its layers. A sharded run needs less memory per GPU, and gathers weights.",
            style="yellow",
        )
    if longest := outcome.measured.get("longest_rows"):
        print_longest_rows(longest)
    if outcome.go:
        console().print(table(outcome.measured))
        for note in notes(outcome.measured):
            print_line(note)
    _print_verdict(outcome.go, outcome.reason, line)
    if held := output_folder.run_files(Path(config.training.output_dir)):
        training = config.training
        if outcome.go and not (training.resume_from_checkpoint or training.overwrite_output_dir):
            print_line(f"warning: {output_folder.output_taken_message(training.output_dir, held)}", style="yellow")
    if config.json:
        verdict = {"go": outcome.go, "reason": outcome.reason, "launch": line, **outcome.measured}
        write_json(config.json, redact_tree(verdict))


def _print_verdict(go: bool, reason: str | None, line: str) -> None:
    if go:
        console().print("GO. Only the measurement was saved. Start the real run with:", style="green")
    print_line(f"  {line}" if go else f"NO-GO: {reason}", style=None if go else "red")


def model_text(measurement: JsonObject) -> str:
    """The number of parameters of the measured model, and of those that are trained."""
    total, trained = measurement["parameters"], measurement["trainable_parameters"]
    part = "all" if trained == total else parameters_text(trained).removesuffix(" parameters")
    return f"{parameters_text(total, measurement['active_parameters'])}, {part} trained"


def table(measured: JsonObject) -> Table:
    """The measured figures."""
    memory, step, whole = measured["memory"], measured["step"], measured["projection"]
    shown = Table(title="Dry run", title_justify="left", show_header=False)
    shown.add_row("model", model_text(measured["measurement"]))
    shown.add_row("longest row of the data", f"{counted(measured['longest_row_tokens'], 'token')}")
    device = "" if memory["device_gib"] is None else f" of {memory['device_gib']:.1f} GiB"
    shared = whole.get("shared_by", 1)
    where = "one device" if shared == 1 else f"{shared} devices that share each row"
    rank = "" if shared == 1 else f" for each of {shared} ranks"
    shown.add_row("peak memory, longest rows", f"{memory['peak_gib']:.2f} GiB{device}{rank}")
    parts = [f"{name} {1e3 * seconds:,.1f}" for name, seconds in step.items()]
    shown.add_row("typical step, in ms", f"{1e3 * sum(step.values()):,.1f} = {' + '.join(parts)}")
    shown.add_row(f"throughput, {where}", f"{whole['tokens_per_second']:,.0f} tokens/s on typical rows")
    length = f"{counted(whole['steps'], 'step')} in {duration(3600 * whole['hours_on_one_device'])}"
    shown.add_row(f"whole run, {where}", f"{length}, including {whole['start_up_seconds']:.0f} s of startup")
    if measured["collectives"]:
        found = measured["collectives"]
        shown.add_row(f"all-reduce over {counted(found['world_size'], 'GPU')}", found["message"])
    losses = measured["losses"]
    if shared == 1:  # one rank alone computes something else
        shown.add_row(f"loss, first and last of {len(losses)}", f"{losses[0]:.4f}, {losses[-1]:.4f}")
    shown.add_row("saved and reloaded", "equal")
    return shown


def print_longest_rows(found: JsonObject) -> None:
    """The longest row that fits with each measured way to keep activations, what the job's choice is if that was
    measured, and how right the prediction was."""
    console().print(longest_rows_table(found["modes"], found["rows"], found["limit_gib"]))
    proof = found.get("proof")
    if found.get("line"):
        print_line(f"{found['line']}.")
    if proof is not None and proof["error"] is not None:
        predicted, measured = (proof[f"{name}_peak_bytes"] / 2**30 for name in ("predicted", "measured"))
        print_line(
            f"Peak memory with {Mode(**proof['mode']).text} on {counted(proof['tokens'], 'token')}: {measured:.2f} GiB "
            f"measured, {predicted:.2f} GiB predicted from shorter rows ({proof['error']:+.1%})."
        )


def longest_rows_table(modes: Sequence[JsonObject], rows: JsonObject, limit_gib: float) -> Table:
    """A row for each way to keep activations.

    Args:
        rows: `activations.Rows` as JSON.
    """
    title = f"Longest row that fits, one row per micro-batch, in {limit_gib:.1f} GiB"
    shown = Table(title=title, title_justify="left")
    shown.add_column("checkpointing")
    compared = max((one["points"][0]["tokens"] for one in modes if one["points"]), default=None)
    speed = "tokens/s" if compared is None else f"tokens/s at {compared:,}"
    for name in ("longest row", speed, f"GiB at {rows['most']:,}", "tokens/s, job"):
        shown.add_column(name, justify="right")
    for one in modes:
        kind = str(one["mode"]["gradient_checkpointing"]).lower() + (", tiled" if one["mode"]["tiled_mlp"] else "")
        if not one["points"]:
            shown.add_row(kind, "memory ran out", "-", "-", "-")
            continue
        longest = one["longest_row_tokens"]
        peak = f"{one['predicted_peak_bytes'] / 2**30:.1f}"
        speed = f"{one['predicted_tokens_per_second']:,.0f}" if one["fits"] else "-"
        known = "any" if longest is None else f"{longest:,}"
        at_compared = f"{one['tokens_per_second']:,.0f}" if one["points"][0]["tokens"] == compared else "-"
        shown.add_row(kind, known, at_compared, peak, speed)
    return shown


def notes(measured: JsonObject) -> list[str]:
    """Recommendations and warnings that follow from the figures."""
    sizes, memory = measured["micro_batch_search"], measured["memory"]
    lines = []
    if (shared := measured["projection"].get("shared_by", 1)) > 1:
        lines.append(
            f"{_as_one_of(shared)} Nothing is exchanged with other ranks: the figures are without that time, and "
            "losses are not those of a run."
        )
    if not sizes["attempts"]:
        lines.append(f"Micro-batch size: {sizes['reason']}.")
    elif sizes["largest_that_fits"] is None:
        lines.append(f"No micro-batch size stays below the limit of {sizes['limit_gib']:.1f} GiB (80% of the memory).")
    else:
        tried = ", ".join(_attempt(one) for one in sizes["attempts"])
        lines.append(
            f"Micro-batch size, limit {sizes['limit_gib']:.1f} GiB (80% of the memory): {tried}. The largest that fits "
            f"is {sizes['largest_that_fits']}. Recommended: {sizes['flag']}"
        )
        if sizes["recommended"] != measured["measurement"]["per_device"]:
            lines.append("A run that leaves the size open takes it: repeat the dry run to measure the job with it.")
    if memory["limit_gib"] is not None and memory["peak_gib"] > memory["limit_gib"]:
        lines.append("warning: peak memory is above 80% of the GPU memory; fragmentation may still end the run.")
    if (memory["held_by_others_gib"] or 0.0) * 2**30 > NOTABLE_OUTSIDE_BYTES:
        lines.append(
            f"warning: other processes use {memory['held_by_others_gib']:.1f} GiB of this GPU, so these timings may be "
            "slower than on an idle GPU."
        )
    return lines


def _as_one_of(shared: int) -> str:
    return (
        f"Measured as one of {shared} ranks that share each row: with its part of the tokens, and in attention of the "
        "heads."
    )


def _attempt(one: JsonObject) -> str:
    if one["peak_bytes"] is None:
        return f"{one['per_device']} out of memory"
    speed = f"{one['tokens_per_second']:,.0f} tokens/s" if one["tokens_per_second"] else "not timed"
    return f"{one['per_device']} {one['peak_bytes'] / 2**30:.1f} GiB {speed}"


def print_shards(config: Config, found: Sharded, result: JsonObject, cut: tuple[int, int], line: str) -> None:
    """The figures as a table, and go or no-go."""
    kept = result["sharded"]["activation_gib"]
    print_line(f"The model has {model_text(result['measurement'])}.")
    console().print(f"Measured with {cut[0]} and {cut[1]} of {found.layers} layers on one device:", highlight=False)
    print_line(
        f"activations on the longest rows ({counted(result['longest_row_tokens'], 'token')}): {kept['layers']:.2f} GiB "
        f"in the layers, {kept['outside']:.2f} GiB outside them"
    )
    if (shared := found.whole.shared_by) > 1:
        print_line(_as_one_of(shared))
    shown = Table(title="Sharded", title_justify="left")
    for name in ("GPUs", "GiB on each", "step, ms", "of it waiting", "tokens/s"):
        shown.add_column(name, justify="right")
    for row in result["sharded"]["rows"]:
        waits = row["exposed_seconds"]
        shown.add_row(
            str(row["world_size"]),
            f"{row['peak_memory_gib']:.2f}" + ("" if row["fits"] else " (does not fit)"),
            f"{1e3 * row['step_seconds']:,.1f}" + ("" if waits is not None else " + communication"),
            "not measured" if waits is None else f"{1e3 * waits:,.1f}",
            f"{row['tokens_per_second']:,.0f}",
        )
    console().print(shown)
    if shared == 1 and any(row["exposed_seconds"] is None for row in result["sharded"]["rows"]):
        print_line("`finetune bench comm` on the GPUs of the run measures how long gathering weights takes.")
    _print_verdict(result["go"], f"{result['reason']}.", line)
    if config.json:
        write_json(config.json, redact_tree(result | {"launch": line}))


def launch_line(world: int) -> str:
    """The command that launches the real run on `world` devices with the given arguments."""
    import torch

    target, given = strategy.training_command()
    if scripts.running_script() is None:  # a script's arguments are its own
        given = training_arguments(given)
    launcher = launch_lines.user_command(world, on_cpu=not torch.cuda.is_available())
    return shlex.join([*launcher, *target, *redact_arguments(given)])


def training_arguments(arguments: list[str]) -> list[str]:
    """The arguments of a dry run without those that make it one."""
    given = without_option("--devices", without_option("--json", arguments))
    return [word for word in given if word not in ("--dry-run", "--dry_run", "--longest")]
