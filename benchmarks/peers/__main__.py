"""This package beside stock Unsloth and TRL, each at its best setting and as documented, on the same rows and machine.

    python -m benchmarks.peers --train train.jsonl --work DIR --out peers.json [--cells "1.2b lora real,8b lora 4096"]

A cell is a model's size, a method and the lengths of its documents; it runs its stacks in turn, and again in the
opposite order, each in a process of its own. Peers try their settings in the first round. The record keeps every
finished run, so a command that was cut short goes on where it stopped. Without a GPU: --cells "1m lora short".
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.peers import cells, rank, report, rows
from benchmarks.processes import end_with_this_one, run, say

ROOT = Path(__file__).parent.parent.parent
LEARNING_RATE = {"lora": 2e-4, "qlora": 2e-4, "full": 2e-5}


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the record lacks. Returns the exit code: 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, help="JSON lines whose text is cut into rows; else this project's docs/")
    parser.add_argument("--work", type=Path, required=True, help="scratch folder for models and rows")
    parser.add_argument("--out", type=Path, required=True, help="the record; a plot is written beside it")
    parser.add_argument("--cells", help="separated by commas: " + ", ".join(cells.CELLS))
    parser.add_argument("--variants", default="", help="only these, separated by commas")
    parser.add_argument("--before", type=Path, help="finetune/ and patches/ of another version: variants ours_before*")
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON by variant: not to try its own settings")
    parser.add_argument("--words", default="", help="further arguments of this package's runs")
    parser.add_argument("--limit", type=float, default=420, help="seconds of one run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each variant (documented ones run once)")
    parser.add_argument("--steps", type=int, default=40, help="of a run, the first --skip not measured")
    parser.add_argument("--skip", type=int, default=10)
    parser.add_argument("--trial-steps", type=int, default=5)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no run is started")
    given = parser.parse_args(argv)
    if not 1 <= given.skip < given.steps:
        parser.error(f"--skip {given.skip}: at least 1 and less than --steps {given.steps}")
    end_with_this_one()
    given.work.mkdir(parents=True, exist_ok=True)
    given.train = given.train or documents(given.work / "corpus.jsonl")
    record = json.loads(given.out.read_text()) if given.out.is_file() else {"cells": {}}
    record["machine"] = machine()
    given.gpus = record["machine"]["gpus"]
    deadline, failed = time.monotonic() + given.budget, False
    names = given.cells or ("1.2b lora real" if given.gpus else "1m lora short")
    for name in names.split(","):
        failed |= not measure(cells.cell(name.strip()), given, record, deadline)
    return int(failed)


def documents(file: Path) -> Path:
    """The paragraphs of this project's documentation as rows of text."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    parts = [part for page in pages for part in page.read_text(encoding="utf-8").split("\n\n")]
    file.write_text("".join(json.dumps({"text": part}) + "\n" for part in parts), encoding="utf-8")
    return file


def machine() -> dict[str, Any]:
    """Date, GPUs and cores."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError):
        gpus = []
    return {"date": time.strftime("%Y-%m-%d"), "gpus": [gpu for gpu in gpus if gpu], "cores": os.cpu_count()}


def measure(cell: cells.Cell, given: argparse.Namespace, record: dict[str, Any], deadline: float) -> bool:
    """Run the variants of a cell that the record lacks; False if one failed."""
    from transformers import AutoTokenizer

    model = models.build(given.work / cell.size, cells.SIZES[cell.size], given.train)
    tokenizer = AutoTokenizer.from_pretrained(model)
    files = {}
    for kind in {cell.lengths, "2048"} if cell.lengths == "real" else {cell.lengths}:
        file = given.work / f"rows-{kind}.jsonl"
        files[kind] = (file, rows.build(file, kind, cells.LONGEST[kind], tokenizer, given.train))
    variants = cells.variants(cell, before=given.before)
    wanted = [name for name in variants if not given.variants or name in given.variants.split(",")]
    if not given.gpus:
        wanted = [name for name in wanted if variants[name].stack != "trl"]  # its fused head needs Triton
    about = {kind: counted for kind, (_, counted) in files.items()}
    entry = record["cells"].setdefault(cell.name, {"rows": about, "settings": {}, "runs": []})
    entry["runs"] = [one for one in entry["runs"] if "error" not in one]  # those are tried again
    failed = False
    for number in range(given.rounds):
        for name in wanted if number % 2 == 0 else reversed(wanted):
            variant, earlier = variants[name], [one for one in entry["runs"] if one["variant"] == name]
            done = any(one["round"] == number for one in earlier)
            if done or (number and name.endswith("documented")) or time.monotonic() > deadline:
                continue
            best = entry["settings"].get(name) or given.settings.get(name)
            settings = [best] if best else [asdict(setting) for setting in variant.settings]
            kind = "2048" if variant.fixed else cell.lengths
            attempt = functools.partial(one_run, cell, variant, model, files[kind])
            trials = own_trials(attempt, settings, given) if variant.stack == "ours" and len(settings) > 1 else []
            settings = [fastest["setting"]] if (fastest := _fastest(trials)) else settings
            found = attempt(settings, given)
            if trials:
                found["trials"] = trials
            if trials and "first_step_seconds" in found:  # the first start is the cold one
                found["first_step_seconds"] = trials[0]["first_step_seconds"] or found["first_step_seconds"]
            failed |= "error" in found
            if "setting" in found:
                entry["settings"][name] = found["setting"]
            entry["runs"].append({"variant": name, "round": number, "rows": kind} | found)
            report.complete(record)
            given.out.write_text(json.dumps(record, indent=1) + "\n")
            say(f"{cell.name} {name} round {number + 1}: {report.line(entry['runs'][-1])}")
    report.plot(record, given.out.with_suffix(".png"))
    for name, ratio in record.get("ratios", {}).get(cell.size, {}).items():
        say(f"{cell.size} {name}: {ratio if ratio is None else round(ratio, 3)}")
    return not failed


def own_trials(
    attempt: Callable[..., dict[str, Any]], settings: list[dict[str, Any]], given: argparse.Namespace
) -> list[dict[str, Any]]:
    """This package's settings in turn, each in a process of its own; a peer tries its own in one process (`rank`)."""
    trials: list[dict[str, Any]] = []
    short = argparse.Namespace(**vars(given) | {"steps": rank.WARM_UP + given.trial_steps, "skip": rank.WARM_UP})
    for setting in settings:
        found = attempt([setting], short)
        before = (_fastest(trials) or {}).get("tokens_per_second", 0)
        kept = {name: found.get(name) for name in ("tokens_per_second", "first_step_seconds")}
        trials.append({"setting": setting} | kept)
        if "error" in found:
            trials[-1] |= {"error": found["error"], "output": found["output"][-3:]}
            break
        if found["tokens_per_second"] < rank.SLOWER * before:
            break
    return trials


def _fastest(trials: list[dict[str, Any]]) -> dict[str, Any] | None:
    return max((one for one in trials if "error" not in one), key=lambda one: one["tokens_per_second"], default=None)


def one_run(
    cell: cells.Cell,
    variant: cells.Variant,
    model: Path,
    rows_of: tuple[Path, dict[str, float]],
    settings: list[dict[str, Any]],
    given: argparse.Namespace,
) -> dict[str, Any]:
    """One process; what it measured, or its error."""
    file, about = rows_of
    request = {
        "stack": variant.stack,
        "method": cell.method,
        "packing": variant.packing,
        "options": variant.options | {"words": [*variant.options.get("words", []), *given.words.split()]},
        "settings": settings,
        "model": str(model.resolve()),
        "rows": str(file.resolve()),
        "cache": str((given.work / "cache").resolve()),
        "work": str((given.work / "out").resolve()),
        "steps": given.steps,
        "skipped": given.skip,
        "trial_steps": given.trial_steps,
        "learning_rate": LEARNING_RATE[cell.method],
        "started": time.time(),
    }
    asked, answer, log = (given.work / name for name in ("request.json", "result.json", "output.txt"))
    asked.write_text(json.dumps(request))
    answer.unlink(missing_ok=True)
    before = [str(given.before.resolve())] if variant.before else []
    path = os.pathsep.join([*before, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # On a busy CPU, whether waiting threads spin would decide which stack is faster.
    threads = {} if given.gpus else {"OMP_NUM_THREADS": "1"}
    # One process: TRL refuses several visible GPUs.
    gpu = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]} if given.gpus else {}
    # Unsloth writes its compiled trainers into the working folder; there they are found again.
    with log.open("w") as output:
        code = run(
            [sys.executable, "-m", "benchmarks.peers.rank", asked.resolve(), answer.resolve()],
            env=os.environ | {"PYTHONPATH": path} | threads | gpu,
            cwd=given.work,
            output=output,
            timeout=given.limit,
        )
    if code != 0 or not answer.is_file():
        end = log.read_text(errors="replace").strip().splitlines()[-12:]
        return {"error": "too slow" if code is None else f"exit code {code}", "output": end}
    found = json.loads(answer.read_text())
    flops = cells.flops_per_token(cell, cell.method, about["squared_over_tokens"])
    return found | {"tflops": flops and found["tokens_per_second"] * flops / 1e12}


if __name__ == "__main__":
    raise SystemExit(main())
