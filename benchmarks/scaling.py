"""How training scales over the GPUs of one host: weak and strong, predicted beforehand, with the loss curves.

    python -m benchmarks.scaling --work DIR --out scaling.json [--train train.jsonl] [--cells "1.2b lora weak,..."]
                                 [--world-sizes 1,2,4,8] [--budget SECONDS] [--cpu]

weak    one pack of 16,384 tokens (or --micro-batch) per GPU and step; every number of GPUs trains on the same packs,
        in fewer steps
strong  131,072 tokens per step, whatever the number of GPUs: the loss curves must coincide

Packs differ in attention, and so do steps. So tokens/s are all tokens over all seconds, but for the first record of a
run; the median step of a few would compare other packs.

A cell runs on each number of GPUs in turn, and again in the opposite order; `no-peers` at its end takes the GPUs' peer
access away. Every run is the shipped command, the first of a cell is advised by `finetune advise` on one GPU. The
record keeps each run as it ends, and a command that was cut short goes on where it stopped. A plot is written beside
it. Exit code 1 if a run failed or loss curves differ by more than 1e-3.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import figures, models
from benchmarks.peers import rows
from benchmarks.peers.__main__ import documents, machine
from benchmarks.processes import end_with_this_one, run, say
from finetune.measure import protocol

ROOT = Path(__file__).parent.parent
SIZES = {"1.2b": "llama-1.2b", "8b": "llama-8b", "moe": "qwen3-moe-16", "1m": "llama-1m"}
METHODS = {
    "lora": ["--lora.r", "16", "--training.learning_rate", "2e-4", "--training.gradient_checkpointing", "false"],
    "qlora": ["--lora.r", "16", "--training.learning_rate", "2e-4", "--training.gradient_checkpointing", "false",
              "--model.load_in_4bit", "true"],
    "full": ["--model.full_finetuning", "true", "--training.learning_rate", "2e-5"],
}  # fmt: skip
CELLS = [
    *(f"1.2b {method} {mode}" for method in METHODS for mode in ("weak", "strong")),
    *("8b lora weak", "8b lora strong"),
    *("1.2b lora strong no-peers", "1.2b full weak no-peers"),
]
PACK, GLOBAL_TOKENS = 16384, 131072
SMALL_PACK, SMALL_TOKENS = 256, 1024  # with --cpu
RECORD = 5  # steps
STOPPED = 0.5  # a record slower than this share of the median one was held up by something else
LOSS_TOLERANCE = 1e-3  # relative, per step: what bfloat16 sums in another order differ by
LIMIT = 540  # seconds of one run
KEPT = (
    "world_size",
    "step_seconds_median",
    "tokens",
    "steps",
    "seconds_to_first_step",
    "start_up",
    "peak_memory_gib",
    "losses",
    "exposed_communication_fraction",
    "prediction",
    "attention",
    "mfu",
    "batch",
    "versions",
    "hardware",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the record lacks. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, help="JSON lines whose text is cut into rows; else this project's docs/")
    parser.add_argument("--work", type=Path, required=True, help="scratch folder for models, rows and runs")
    parser.add_argument("--out", type=Path, required=True, help="the record; a plot is written beside it")
    parser.add_argument("--cells", default="", help="separated by commas: " + ", ".join(CELLS))
    parser.add_argument("--world-sizes", default="1,2,4,8", help="numbers of GPUs, separated by commas")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="of a strong run that is timed")
    parser.add_argument("--packs", type=int, default=192, help="of a weak run; a multiple of every number of GPUs")
    parser.add_argument("--micro-batch", type=int, default=1, help="packs of a micro-batch")
    parser.add_argument("--words", default="", help="further arguments of every run")
    parser.add_argument("--curve-steps", type=int, default=200, help="of the first round of a strong cell")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no run is started")
    parser.add_argument("--without-advice", action="store_true", help="predict nothing beforehand")
    parser.add_argument("--cpu", action="store_true", help="a tiny model on gloo ranks, to try the benchmark itself")
    given = parser.parse_args(argv)
    end_with_this_one()
    given.work, given.out = given.work.resolve(), given.out.resolve()
    given.work.mkdir(parents=True, exist_ok=True)
    given.train = (given.train or documents(given.work / "corpus.jsonl")).resolve()
    given.worlds = sorted({1, *(int(text) for text in given.world_sizes.split(","))})
    os.environ.setdefault("FINETUNE_CACHE", str(given.work / "cache"))
    record = json.loads(given.out.read_text()) if given.out.is_file() else {"cells": {}}
    record["machine"] = machine()
    deadline, failed = time.monotonic() + given.budget, False
    for name in given.cells.split(",") if given.cells else (["1m lora strong"] if given.cpu else CELLS):
        failed |= not measure(name.strip(), given, record, deadline)
    return int(failed)


def measure(name: str, given: argparse.Namespace, record: dict[str, Any], deadline: float) -> bool:
    """The runs of a cell that the record lacks; False if one failed or the loss depends on the number of GPUs."""
    from transformers import AutoTokenizer

    size, method, mode, *further = name.split()
    known = size in SIZES and method in METHODS and mode in ("weak", "strong") and further in ([], ["no-peers"])
    if not known:
        raise SystemExit(f"cell {name!r}: not one of {', '.join(CELLS)}")
    model = models.build(given.work / size, SIZES[size], given.train)
    kind, longest = ("short", 64) if given.cpu else ("real", 2048)
    file = given.work / f"rows-{kind}.jsonl"
    rows.build(file, kind, longest, AutoTokenizer.from_pretrained(model), given.train)
    variables = {"NCCL_P2P_DISABLE": "1"} if further else {}
    cell = record["cells"].setdefault(name, {"advice": {}, "runs": []})
    advised = given.worlds if mode == "weak" else given.worlds[:1]  # a prediction is for a global batch
    for world in [] if given.without_advice else advised:
        if str(world) not in cell["advice"] and time.monotonic() < deadline:
            found = advice(words_of(name, world, given, model, file, 5000), variables, given)
            cell["advice"][str(world)] = found
    for number in range(given.rounds):
        for world in given.worlds if number % 2 == 0 else reversed(given.worlds):
            done = any(one["round"] == number and one["world_size"] == world for one in cell["runs"])
            if done or time.monotonic() > deadline:
                continue
            steps = (
                given.packs // (world * given.micro_batch)
                if mode == "weak"
                else given.curve_steps
                if number == 0
                else given.steps
            )
            found = train(world, words_of(name, world, given, model, file, steps), variables, given)
            if "error" in found:
                say(f"{name} on {world}: {found['error']}: {' | '.join(found['output'][-3:])}")
                return False
            cell["runs"].append({"round": number} | found)
            cell["summary"] = summary(cell["runs"], strong=mode == "strong")
            given.out.write_text(json.dumps(record, indent=1).replace(f"{given.work}/", "") + "\n")
            say(line(name, cell["summary"][str(world)]))
    plot(record, given.out.with_suffix(".png"))
    apart = cell.get("summary", {}).get("largest_loss_difference")
    if apart is not None:
        say(f"{name}: loss curves are at most {apart:.1e} apart")
    return apart is None or apart <= LOSS_TOLERANCE


def words_of(name: str, world: int, given: argparse.Namespace, model: Path, file: Path, steps: int) -> list[str]:
    """Arguments of the shipped command."""
    _, method, mode, *_ = name.split()
    pack, tokens = (SMALL_PACK, SMALL_TOKENS) if given.cpu else (PACK, GLOBAL_TOKENS)
    packs = world * given.micro_batch if mode == "weak" else tokens // pack
    words = [
        *("--model.model_name_or_path", model, "--data.train_file", file, "--data.packing", "true"),
        *("--data.max_length", pack, "--training.per_device_train_batch_size", given.micro_batch),
        *("--training.global_batch_size", packs, "--training.max_steps", steps, "--training.save_steps", 0),
        *("--training.output_dir", given.work / "run", "--training.overwrite_output_dir", "true"),
        *("--logging.logging_steps", RECORD, "--logging.generate_samples", 0, *METHODS[method], *given.words.split()),
    ]
    return [str(word) for word in words]


def advice(words: list[str], variables: dict[str, str], given: argparse.Namespace) -> dict[str, Any] | None:
    """What `finetune advise` says beforehand, from a dry run on one GPU; None if it fails."""
    file = given.work / "advice.json"
    file.unlink(missing_ok=True)
    worlds = ",".join(map(str, given.worlds))
    words = ["--world-sizes", worlds, "--json", str(file), *words]
    launched(["-m", "finetune.advise", *words], variables, given)
    return json.loads(file.read_text()) if file.is_file() else None


def train(world: int, words: list[str], variables: dict[str, str], given: argparse.Namespace) -> dict[str, Any]:
    """Fields of run.json, or the error and the end of the output."""
    profile = {1: "single.yaml"}.get(world, "cpu_2.yaml" if given.cpu else f"ddp_{world}.yaml")
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(ROOT / "accelerate_configs" / profile)]
    began = time.time()
    code = launched([*launcher, "-m", "finetune.train", *words], variables, given)
    if code != 0:
        output = (given.work / "output.txt").read_text(errors="replace").strip().splitlines()[-15:]
        return {"error": "too slow" if code is None else f"exit code {code}", "output": output}
    found = json.loads((given.work / "run" / "run.json").read_text())
    lines = (given.work / "run" / "runs" / "ranks.jsonl").read_text().splitlines()
    seconds = [one for line in map(json.loads, lines) if line["kind"] == "record" for one in line["step_seconds"]]
    kept = {key: found.get(key) for key in KEPT} | {"step_seconds": seconds}
    return kept | rate(lines) | {"seconds": time.time() - began}


def launched(command: list[str], variables: dict[str, str], given: argparse.Namespace) -> int | None:
    """Exit code of a Python command, None if it took too long."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    threads = {"OMP_NUM_THREADS": "1"} if given.cpu else {}
    with (given.work / "output.txt").open("w") as output:
        env = os.environ | variables | threads | {"PYTHONPATH": path}
        return run([sys.executable, *command], env=env, cwd=given.work, output=output, timeout=LIMIT)


# --- figures ----------------------------------------------------------------------------------------------------------


def summary(runs: Sequence[dict[str, Any]], *, strong: bool) -> dict[str, Any]:
    """Per number of GPUs: tokens/s of all of them, efficiency against one GPU in the same round, with
    their intervals over the rounds; memory per rank, exposed communication and the error of the prediction.

    For a strong cell also the largest relative difference of a step's loss between numbers of GPUs, over the steps that
    the runs of a round have in common.
    """
    speeds = {(one["round"], one["world_size"]): one["tokens_per_second"] for one in runs}
    found: dict[str, Any] = {}
    for world in sorted({world for _, world in speeds}):
        own = [one for one in runs if one["world_size"] == world]
        shares = [
            speeds[number, world] / (world * speeds[number, 1])
            for number, other in sorted(speeds)
            if other == world and (number, 1) in speeds
        ]
        errors = [(one.get("prediction") or {}).get("step_seconds") or {} for one in own]
        found[str(world)] = {
            "world_size": world,
            "tokens_per_second": protocol.summarize([[one["tokens_per_second"]] for one in own]).to_dict(),
            "efficiency": protocol.summarize([[share] for share in shares]).to_dict() if shares else None,
            "exposed_communication_fraction": [one["exposed_communication_fraction"] for one in own],
            "peak_memory_gib": own[-1]["peak_memory_gib"],
            "seconds_to_first_step": [one["seconds_to_first_step"] for one in own],
            "prediction_error": [one["error"] for one in errors if one.get("error") is not None],
        }
    if strong:
        curves = [[one for one in runs if one["round"] == number] for number in {one["round"] for one in runs}]
        found["largest_loss_difference"] = max(
            (difference(alike[0]["losses"], one["losses"]) for alike in curves for one in alike[1:]), default=None
        )
    return found


def rate(lines: Sequence[str]) -> dict[str, float]:
    """Tokens/s of all GPUs of a run, from its ranks.jsonl, and the number of records left out besides the first, in
    which kernels are compiled."""
    records = [one for one in map(json.loads, lines) if one["kind"] == "record"][1:]
    totals = [(sum(rank["tokens"] for rank in one["ranks"]), sum(one["step_seconds"])) for one in records]
    usual = median(tokens / seconds for tokens, seconds in totals)
    kept = [(tokens, seconds) for tokens, seconds in totals if tokens / seconds > STOPPED * usual]
    tokens, seconds = map(sum, zip(*kept, strict=True))
    return {"tokens_per_second": tokens / seconds, "records_left_out": len(totals) - len(kept)}


def difference(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference of two loss curves; infinite if they differ in number."""
    if len(one) != len(other):
        return float("inf")
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


def line(name: str, found: dict[str, Any]) -> str:
    """One number of GPUs in words."""
    efficiency = found["efficiency"] and f"{found['efficiency']['mean']:.1%} efficient"
    error = f", predicted {found['prediction_error'][-1]:+.1%}" if found["prediction_error"] else ""
    return (
        f"{name} on {found['world_size']}: {found['tokens_per_second']['mean']:,.0f} tokens/s, {efficiency}{error}, "
        f"first step after {found['seconds_to_first_step'][-1]:.0f} s"
    )


def plot(record: dict[str, Any], path: Path) -> None:
    """Efficiency by number of GPUs, and the loss curves of the first strong cell; nothing without matplotlib."""
    cells = {name: cell for name, cell in record["cells"].items() if cell.get("summary")}
    figure = figures.new_figure(8) if cells else None
    if figure is None:
        return
    strong = next((name for name in cells if " strong" in name), None)
    left, *rest = figure.subplots(1, 1 + bool(strong), squeeze=False)[0]
    for name, cell in cells.items():
        points = [
            (one["world_size"], 100 * one["efficiency"]["mean"])
            for one in cell["summary"].values()
            if isinstance(one, dict) and one["efficiency"]
        ]
        left.plot(*zip(*points, strict=True), marker="o", label=name)
    left.set(xlabel="GPUs", ylabel="tokens/s per GPU, % of one GPU", xticks=[1, 2, 4, 8])
    left.legend(frameon=False, fontsize=8)
    for right in rest:
        for one in cells[strong]["runs"]:
            if one["round"] == 0:
                steps = range(1, len(one["losses"]) + 1)
                right.plot(steps, one["losses"], label=f"{one['world_size']} GPUs", linewidth=1)
        right.set(title=strong, xlabel="step", ylabel="loss")
        right.legend(frameon=False, fontsize=8)
    figures.save(figure, path)


if __name__ == "__main__":
    raise SystemExit(main())
