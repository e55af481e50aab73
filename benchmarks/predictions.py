"""Was the advice right? Predictions from one GPU and the measured all-reduce, held against runs on 1 to N GPUs.

    python -m benchmarks.predictions --train train.jsonl --work WORK --out OUT.json [--world-sizes 1,2]

On GPUs of one host. First `finetune bench comm` with and without peer access (unless --work has its files), then for
as many cases at a time as there are GPUs: `finetune advise`, and the shipped training command on one GPU,
side by side, one on each; then that command on several, on as many groups of GPUs as there are, at last on all. It
scores its own prediction in run.json. The verdict is held against the measured one by the same rule: the number of GPUs
that is fastest at an efficiency of at least 70 %. It is median steps that are compared: advice is asked for a long run,
and in a short one what the first steps compile decides.
Side by side they share the host, which sets the pace of short steps, and of all steps where it is busy: `--alone` runs
one job at a time.
`--too-large` does something else alone, on one GPU: full fine-tuning of a model that does not fit it, which advice must
refuse and a run must not survive.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.models import SHAPES, build
from benchmarks.processes import say, side_by_side
from finetune.advise.verdict import EFFICIENCY_TO_JUSTIFY

NO_PEERS = {"NCCL_P2P_DISABLE": "1"}
ONE_PACK = ["--training.per_device_train_batch_size", "1", "--training.global_batch_size", "4"]
LORA = ["--lora.r", "16", "--training.learning_rate", "2e-4", "--training.gradient_checkpointing", "false"]
FULL = ["--model.full_finetuning", "true", "--training.learning_rate", "2e-5"]
LIMIT_SECONDS = 300
LONG = 5000  # steps of the run that advice is asked for: in a short one the start of several ranks decides


def packs_of(tokens: int) -> list[str]:
    """Arguments of packed data, one pack a micro-batch, four a step."""
    return ["--data.packing", "true", "--data.max_length", "2048", "--data.pack_length", str(tokens), *ONE_PACK]


class Failed(Exception):
    """A command of this project ended with an error."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job, and the environment of its ranks."""

    words: list[str]
    environment: dict[str, str]
    steps: int  # a run begins slower than it goes on


CASES = {
    "LoRA, packs of 16,384": Case(words=[*LORA, *packs_of(16384)], environment={}, steps=50),
    "QLoRA, packs of 16,384": Case(
        words=[*LORA, *packs_of(16384), "--model.load_in_4bit", "true"], environment={}, steps=50
    ),
    "full, packs of 16,384": Case(words=[*FULL, *packs_of(16384)], environment={}, steps=30),
    "full, packs of 16,384, no peer access": Case(words=[*FULL, *packs_of(16384)], environment=NO_PEERS, steps=30),
    # On an H200 the host takes longer to launch the kernels of such a micro-batch than the GPU to run them.
    "LoRA, packs of 8,192": Case(words=[*LORA, *packs_of(8192)], environment={}, steps=80),
    # Four short rows a step: more so.
    "LoRA, 4 rows of at most 64 tokens": Case(
        words=[*LORA, "--data.max_length", "64", "--training.global_batch_size", "4"], environment={}, steps=160
    ),
}


def main() -> int:
    """Run what is asked for; write after each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--world-sizes", type=lambda text: sorted({1, *(int(one) for one in text.split(","))}), default=[1, 2]
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-1.2b")
    parser.add_argument("--cases", default="", help="only those whose name matches this regular expression")
    parser.add_argument("--alone", action="store_true", help="one job at a time")
    parser.add_argument("--too-large", choices=SHAPES, help="only: full fine-tuning of this shape, on the first GPU")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    processes.end_with_this_one()
    os.environ.setdefault("FINETUNE_CACHE", str(options.work / "cache"))
    results: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "shape": options.shape, "cases": {}}
    if options.too_large:
        return too_large(options, results | {"shape": options.too_large})
    comm = {name: collectives(options, name, variables) for name, variables in (("peers", {}), ("no-peers", NO_PEERS))}
    chosen = [name for name in CASES if re.search(options.cases, name)]
    at_a_time = 1 if options.alone else max(options.world_sizes)
    for start in range(0, len(chosen), at_a_time):
        model = build(options.work / "model", options.shape, options.train)  # once: it stays
        measure(options, results, model, comm, {name: CASES[name] for name in chosen[start : start + at_a_time]})
    wrong = [name for name, one in results["cases"].items() if not one["verdict_right"]]
    say(f"{len(results['cases']) - len(wrong)} of {len(results['cases'])} verdicts right; wrong: {wrong or 'none'}")
    return int(bool(wrong))


def measure(
    options: argparse.Namespace, results: dict[str, Any], model: Path, comm: dict[str, Path], cases: dict[str, Case]
) -> None:
    """Advice and runs of a few cases, into `results`."""
    gpus = max(options.world_sizes)
    alone: dict[Any, Any] = {
        name: tried(lambda gpu, case=case: advise(options, model, case, comm, gpu)) for name, case in cases.items()
    }
    for case in cases.values():  # the run on one GPU does not depend on how several would talk
        alone[tuple(case.words)] = tried(lambda gpu, case=case: train(options, model, case, [gpu]))
    found = side_by_side(alone, range(1 if options.alone else gpus))
    several: dict[str, dict[int, Any]] = {name: {1: found[tuple(case.words)]} for name, case in cases.items()}

    def one_of_several(name: str, group: range) -> None:
        several[name][len(group)] = tried(lambda gpus: train(options, model, cases[name], gpus))(group)
        if len(group) < gpus:
            return
        # The largest number comes last, case by case.
        runs = several[name]
        if any(isinstance(one, Failed) for one in (found[name], *runs.values())):
            say(f"{name}: left out, a command failed")
        else:
            measured = {world: scored(run) for world, run in runs.items()}
            unscored = {
                world: one for world, one in measured.items() if not (one["prediction"] or {}).get("step_seconds")
            }
            with_predictions(found[name], unscored)
            record(options, results, name, judge(found[name], measured))

    for world in options.world_sizes[1:]:
        last = world if options.alone else gpus
        groups = [range(first, first + world) for first in range(0, last - world + 1, world)]
        side_by_side({name: lambda group, name=name: one_of_several(name, group) for name in cases}, groups)


def too_large(options: argparse.Namespace, results: dict[str, Any]) -> int:
    """Advice on a model that does not fit, and the run as it was given."""
    model = build(options.work / options.too_large, options.too_large, options.train)
    advice, out = options.work / "too-large.json", options.work / "too-large"
    case = Case(words=[*FULL, *packs_of(2048)], environment={}, steps=10)  # short: it is the weights that do not fit
    words = words_of(options, model, case, out.name)
    found: dict[str, Any] = {}
    results["cases"] = {f"full, {options.too_large}": found}

    def keep(**new: Any) -> None:
        """What is known stays, whatever comes after."""
        found.update(new)
        write(options, results)

    refused = run(["-m", "finetune.advise", *words, "--json", str(advice)], allowed=(0, 1)) == 1
    said = json.loads(advice.read_text())
    keep(advice=said, refused=refused)
    fails = run(["-m", "finetune.train", *words], allowed=(0, 1)) == 1
    as_given = json.loads((out / "run.json").read_text())
    keep(as_given={name: as_given.get(name) for name in ("status", "error")}, fails=fails)
    right = refused and fails
    keep(verdict_right=right)
    say(f"{options.too_large}: refused {refused}, fails {fails}")
    return int(not right)


def collectives(options: argparse.Namespace, name: str, variables: dict[str, str]) -> Path:
    """The file of `finetune bench comm`, measured unless it is there; the cache gets it too, for the scores."""
    path = options.work / f"comm-{name}.json"
    if not path.is_file():
        worlds = ",".join(str(world) for world in options.world_sizes if world > 1)
        words = ["-m", "finetune.bench", "comm", "--world-sizes", worlds, "--json", str(path)]
        run([*words, "--runs", "3", "--steps", "30"], variables)
    return path


def words_of(options: argparse.Namespace, model: Path, case: Case, name: str) -> list[str]:
    """Arguments of a job, for `advise` and for the run."""
    return [
        *("--model.model_name_or_path", str(model), "--data.train_file", str(options.train)),
        *("--data.columns", "{instruction: question, output: answer}", "--training.max_steps", str(case.steps)),
        *("--training.save_steps", "0", "--logging.logging_steps", "10", "--logging.generate_samples", "0"),
        *("--training.output_dir", str(options.work / name), "--training.overwrite_output_dir", "true", *case.words),
    ]


def advise(options: argparse.Namespace, model: Path, case: Case, comm: dict[str, Path], gpu: int) -> dict[str, Any]:
    """The advice for a case, from its one GPU and the measured all-reduce."""
    out = options.work / f"advice-{gpu}-{time.monotonic_ns()}.json"
    worlds = ",".join(map(str, options.world_sizes))
    file = comm["no-peers" if case.environment else "peers"]
    words = ["-m", "finetune.advise", "--comm", str(file), "--world-sizes", worlds, "--json", str(out)]
    job = [*words_of(options, model, case, f"advised-{gpu}"), "--training.max_steps", str(LONG)]
    # All GPUs are in sight, as for a user, and the first of them is the one that dry runs take.
    seen = ",".join(map(str, [gpu, *(other for other in range(max(options.world_sizes)) if other != gpu)]))
    run([*words, *job], {"CUDA_VISIBLE_DEVICES": seen})
    return json.loads(out.read_text())


def train(options: argparse.Namespace, model: Path, case: Case, gpus: Sequence[int]) -> dict[str, Any]:
    """run.json of the shipped command on these GPUs."""
    seen = ",".join(map(str, gpus))
    name = f"run-on-{seen.replace(',', '-')}"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(len(gpus))]
    launcher = launcher if len(gpus) > 1 else []
    variables = case.environment | {"CUDA_VISIBLE_DEVICES": seen}
    run([*launcher, "-m", "finetune.train", *words_of(options, model, case, name)], variables)
    return json.loads((options.work / name / "run.json").read_text())


def scored(run_json: dict[str, Any]) -> dict[str, Any]:
    """What a run measured, and how its prediction did. Its tokens_per_second are those of all GPUs in a median step."""
    kept = ("tokens_per_second_per_gpu", "step_seconds_median", "peak_memory_gib", "exposed_communication_fraction")
    kept += ("seconds_to_first_step", "mfu", "prediction", "batch", "tokens", "steps")
    return {name: run_json[name] for name in kept} | {
        "tokens_per_second": run_json["tokens"] / run_json["steps"] / run_json["step_seconds_median"]
    }


def judge(advice: dict[str, Any], runs: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Whether the number of GPUs that was advised is the one that the same rule takes from what was measured."""
    one = runs[1]["tokens_per_second"]
    for world, measured in runs.items():
        measured["efficiency"] = measured["tokens_per_second"] / (world * one)
    good = [world for world, measured in runs.items() if measured["efficiency"] >= EFFICIENCY_TO_JUSTIFY]
    best = max(good, key=lambda world: runs[world]["tokens_per_second"])
    return {
        "advised": advice["world_size"],
        "reason": advice["reason"],
        "measured_best": best,
        "verdict_right": advice["world_size"] == best,
        "runs": runs,
        "advice": {name: advice[name] for name in ("rows", "notes")},
    }


def with_predictions(advice: dict[str, Any], runs: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The runs with what was predicted for each, in the form of run.json."""
    for row in advice["rows"]:
        measured = runs.get(row["world_size"])
        if measured is not None and row.get("step_seconds"):
            pairs = {
                "step_seconds": (row["step_seconds"], measured["step_seconds_median"]),
                "peak_memory_gib": (row["peak_memory_bytes"] / 2**30, max(measured["peak_memory_gib"])),
            }
            measured["prediction"] = {
                name: {"predicted": predicted, "measured": found, "error": (predicted - found) / found}
                for name, (predicted, found) in pairs.items()
            }
    return runs


def record(options: argparse.Namespace, results: dict[str, Any], name: str, found: dict[str, Any]) -> None:
    """Into the file, and a line for people."""
    results["cases"][name] = found
    write(options, results)
    parts = []
    for world, measured in found["runs"].items():
        prediction = measured.get("prediction") or {}
        errors = [
            f"{field.split('_')[0]} {prediction[field]['error']:+.1%}"
            for field in ("step_seconds", "peak_memory_gib")
            if prediction.get(field) and prediction[field]["error"] is not None
        ]
        rate = f"{measured['tokens_per_second']:,.0f}/s ({measured['efficiency']:.0%})"
        parts.append(f"{world}: {rate} {', '.join(errors) or prediction.get('reason')}")
    right = "right" if found["verdict_right"] else f"WRONG (measured best: {found['measured_best']})"
    say(f"{name}: advised {found['advised']}, {right}; " + "; ".join(parts))


def write(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """All that is known so far; it names files, not this machine's folders."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1) + "\n"
    for folder in (options.work, Path(os.environ["FINETUNE_CACHE"])):
        text = text.replace(f"{folder}/", "")
    options.out.write_text(text)


def tried(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same call, which returns the failure of its command: the others go on."""

    def careful(place: Any) -> Any:
        try:
            return call(place)
        except Failed as error:
            say(str(error))
            return error

    return careful


def run(words: list[str], variables: dict[str, str] | None = None, *, allowed: Sequence[int] = (0,)) -> int:
    """A command of this project; its exit code, one of `allowed`.

    Raises:
        Failed: with what it said, or that it took too long.
    """
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        env = os.environ | (variables or {})
        code = processes.run([sys.executable, *words], env=env, output=output, timeout=LIMIT_SECONDS)
        output.seek(0)
        said = output.read()
    shown = " ".join(word for word in words if not word.startswith("/"))[:110]
    say(f"  {time.monotonic() - began:4.0f} s, {'too long' if code is None else f'exit {code}'}: {shown}")
    if code not in allowed:
        raise Failed(said[-4000:])
    return code


if __name__ == "__main__":
    raise SystemExit(main())
