"""Repeats the published study of one GPU against two on this machine.

python -m benchmarks.study --runs 50 --out DIR
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from benchmarks.study import lora as study_lora
from benchmarks.study import report as study_report
from finetune.bench import comm, conditions, launch
from finetune.bench.launch import choose_world_sizes
from finetune.errors import UserError
from finetune.measure.protocol import MEASURED, RUNS, WARM_UP
from finetune.runtime.command import DONE, print_line, run_with_options
from finetune.runtime.files import write_json
from finetune.runtime.machine.hardware import Hardware, survey, topology_line
from finetune.runtime.machine.nccl import explain_settings, recommend_settings
from finetune.runtime.options import Options, count, counts, names, path
from finetune.runtime.types import JsonObject
from finetune.text import counted


@dataclass(frozen=True, kw_only=True)
class Model:
    """A dense model of the study, which states hidden widths, dropout and number of parameters, but neither input width
    nor classes. Here there are ten classes, and the input width comes closest to the stated number of parameters."""

    name: str
    widths: tuple[int, ...]  # input, hidden layers, classes
    dropout: float
    batches: tuple[int, ...]  # global

    @property
    def parameters(self) -> int:
        """Number of weights and biases."""
        return sum(before * after + after for before, after in zip(self.widths, self.widths[1:], strict=False))


MODELS = (
    Model(name="258K", widths=(844, 256, 128, 64, 10), dropout=0.2, batches=(16, 32, 64, 128)),
    Model(name="6.9M", widths=(4813, 1024, 1024, 512, 512, 256, 10), dropout=0.3, batches=(8, 16, 32, 64)),
)


def main(argv: list[str] | None = None) -> int:
    """Run the study. Returns the exit code."""
    return run_with_options(own_options().format_help(), argv, run)


def own_options() -> Options:
    """The options of this command."""
    purpose = "Reproduce a published study of one GPU against two, on dense models of 258 K and 6.9 M parameters."
    found = Options("", purpose, configuration=False)
    found.prog = "python -m benchmarks.study"
    found.usage = f"{found.prog} [options]"
    found.add("--world-sizes", counts, "1,2", "world sizes (default: 1, 2, 4 and 8, up to the number of GPUs)")
    found.add("--runs", count, "N", "number of runs (default: %(default)s; the published study: 50)", RUNS)
    found.add("--steps", count, "N", f"steps per run, after {WARM_UP} of warm-up (default: %(default)s)", MEASURED)
    found.add("--models", names, "NAME,...", "258K, 6.9M and, as LoRA on GPUs, llama-1.2b, llama-3b")
    plots = "Markdown, JSON and, with `pip install '.[plots]'`, PNG"
    found.add("--out", path, "DIR", f"write the results to this folder: {plots}")
    return found


def run(argv: list[str]) -> int:
    """Measure, print and write.

    Raises:
        UserError: bad options.
        RunError: a rank failed.
    """
    options, _ = own_options().split(argv)
    for found in study(options):
        if options.json:
            write_json(options.json, found)
    return DONE


def study(options: argparse.Namespace) -> Iterator[JsonObject]:
    """Measure all models at every world size and in every mode. Yields the content of `--json`."""
    machine = survey()
    world_sizes = choose_world_sizes(options.world_sizes, machine.count)
    for world in world_sizes:
        comm.check_world(world, machine)
    if 1 not in world_sizes:
        raise UserError(f"the study compares with one device: --world-sizes {','.join(map(str, world_sizes))}. Add 1.")
    models, shapes = chosen(options.models)
    print_line(topology_line(machine))
    print_line(explain_settings(machine, recommend_settings(machine)))
    found: JsonObject = {
        "kind": "study",
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "hardware": machine.to_dict(),
        "topology": topology_line(machine),
        "protocol": {"runs": options.runs, "steps": options.steps, "warm_up": WARM_UP, "precision": "float32"},
        "models": [asdict(model) | {"parameters": model.parameters} for model in models],
        "modes": [],
        "lora": None,
    }

    def keep(lora: JsonObject | None = None) -> None:
        """Write what is measured so far, so that a later failure loses nothing."""
        found["lora"] = lora
        if options.out:
            write_json(options.out / "study.json", found)

    alone = measure(models, 1, {}, options, machine) if models else {}
    for name, environment in modes(machine) if models else ():
        runs, mode = {1: alone}, {"name": name, "environment": environment, "rows": []}
        found["modes"].append(mode)
        for world in world_sizes:
            if world > 1:
                runs[world] = measure(models, world, environment, options, machine)
            mode["rows"] = rows(models, runs)
            keep()
            yield found
    if shapes:
        keep(study_lora.measure(shapes, world_sizes, modes(machine), options.runs, options.steps, machine, keep))
    study_report.show(found)
    if options.out:
        study_report.write(found, options.out)
    yield found


def chosen(names: Sequence[str] | None) -> tuple[list[Model], list[str]]:
    """The dense models and LoRA shapes with these names; all of them if none is given.

    Raises:
        UserError: an unknown name.
    """
    dense = {model.name: model for model in MODELS}
    known = (*dense, *study_lora.SHAPES)
    wrong = [name for name in names or () if name not in known]
    if wrong:
        raise UserError(f"unknown model: --models {','.join(wrong)}. Choose from {', '.join(known)}.")
    names = names or known
    return [dense[name] for name in names if name in dense], [name for name in names if name not in dense]


def modes(machine: Hardware) -> list[tuple[str, dict[str, str]]]:
    """Modes of communication to compare: this machine's own and, if GPUs have peer access, without it, as a stand-in
    for the study's host bridge."""
    base = {one.name: one.value for one in recommend_settings(machine)}
    links = machine.links or ()
    if not links:
        return [("gloo on this CPU" if machine.device == "cpu" else "one GPU", base)]
    if any(link.peer_access for link in links):
        return [("peer access", base), ("NCCL_P2P_DISABLE=1", base | {"NCCL_P2P_DISABLE": "1"})]
    return [("no peer access", base)]


def measure(
    models: Sequence[Model],
    world: int,
    environment: dict[str, str],
    options: argparse.Namespace,
    machine: Hardware,
    *,
    ddp: bool = False,
) -> dict[tuple[str, int], JsonObject]:
    """Measure every model at every global batch size that `world` ranks divide evenly, by (model, batch).

    With `ddp` a single rank also uses DDP, with everything it does except sending and waiting."""
    cases = [
        {"model": model.name, "widths": model.widths, "dropout": model.dropout, "batch": batch}
        for model in models
        for batch in model.batches
        if batch % world == 0
    ]
    request = {"cases": cases, "runs": options.runs, "steps": options.steps, "warm_up": WARM_UP, "ddp": ddp}
    title = f"dense models on {counted(world, 'rank')}" + (" in DDP" if ddp else "")
    title += f", {comm.show(environment)}" if environment and world > 1 else ""
    measured = launch.ranks("benchmarks.study.rank", world, request, title=title, environment=environment)
    found = {}
    for case, result in zip(cases, measured, strict=True):
        states = [one.pop("states") for one in result["ranks"]]
        result["conditions"] = conditions.describe([one[0] for one in states], [one[1] for one in states], machine)
        found[case["model"], case["batch"]] = result
    return found


def rows(models: Sequence[Model], runs: dict[int, dict[tuple[str, int], JsonObject]]) -> list[JsonObject]:
    """A row per model, batch and world size, with ratios to one device. Rates are computed from median steps."""
    found = []
    for model in models:
        for batch in model.batches:
            for world, results in runs.items():
                result = results.get((model.name, batch))
                if result is None:
                    continue
                step = result["step_seconds"]["median"]
                speed_up = runs[1][model.name, batch]["step_seconds"]["median"] / step
                parts = result["ranks"][0]["seconds"]
                exposed, beside = parts["exposed"], parts["step"]["median"]  # both from the run timed by phase
                found.append(
                    {
                        **{"model": model.name, "batch": batch, "world_size": world, **result},
                        "samples_per_second": batch / step,
                        "speed_up": speed_up,
                        "efficiency": speed_up / world,
                        "exposed_communication_fraction": exposed["median"] / beside if exposed else None,
                    }
                )
    return found


def versions() -> dict[str, str]:
    """Version of torch, with its build."""
    import torch

    return {"torch": torch.__version__}
