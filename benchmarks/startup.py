"""Seconds from the shell's return key to the first optimizer step, by phase, of LoRA training on one device.

    python -m benchmarks.startup --train train.jsonl --work DIR --out startup.jsonl [--shape llama-1.2b] [--rounds 3]

Each round runs every combination of backend and launcher once, in turn; the first round finds cold caches. A line of
the record is one run, with run.json's `start_up`. `--without PATCHES` runs each Unsloth combination without them, too.
`--profile` adds one run per backend under cProfile (its times are not comparable), into DIR/profile-BACKEND.txt.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pstats
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.processes import end_with_this_one, run, say
from finetune import train
from finetune.runtime import bootstrap
from finetune.runtime.command import run_command

ROOT = Path(__file__).parent.parent
LAUNCHERS = {
    "python": ["-m"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1", "-m"],
    "accelerate-launch": ["-m", "accelerate.commands.launch", "--num_processes", "1", "-m"],
    "accelerate launch": ["-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", "1", "-m"],
}
LIMIT = 300  # seconds of one run


def main(argv: Sequence[str] | None = None) -> int:
    """Run all rounds. Returns the exit code: 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="JSON lines with the columns question and answer")
    parser.add_argument("--work", type=Path, required=True, help="scratch folder")
    parser.add_argument("--out", type=Path, required=True, help="the record; lines are appended")
    parser.add_argument("--shape", default="llama-1.2b", choices=models.SHAPES)
    parser.add_argument("--backends", default="transformers,unsloth", help="separated by commas")
    parser.add_argument("--launchers", default=",".join(LAUNCHERS), help="separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without", default="", help="names of patches, separated by commas")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("more", nargs="*", help="further arguments of finetune.train, after --")
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--rank"]:
        return run_command("train", words[2:], functools.partial(train.run, without=words[1].split(",")))
    given = parser.parse_args(words)
    end_with_this_one()
    given.work.mkdir(parents=True, exist_ok=True)
    given.work = given.work.resolve()
    model = models.build(given.work / given.shape, given.shape, given.train.resolve())
    os.environ.setdefault("FINETUNE_CACHE", str(given.work / "cache"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    failed = False
    for number in range(given.rounds):
        for backend in given.backends.split(","):
            for launcher in given.launchers.split(","):
                for without in ["", given.without] if given.without and backend == "unsloth" else [""]:
                    line = {"round": number, "backend": backend, "launcher": launcher, "without": without}
                    line |= start(given, model, backend, LAUNCHERS[launcher], without)
                    failed |= "error" in line
                    say(describe(line))
                    with given.out.open("a") as out:
                        out.write(json.dumps(line | {"shape": given.shape, "versions": bootstrap.versions()}) + "\n")
    for backend in given.backends.split(",") if given.profile else ():
        profile(given, model, backend)
    return int(failed)


def start(
    given: argparse.Namespace, model: Path, backend: str, launcher: Sequence[str], without: str
) -> dict[str, Any]:
    """One run of three steps. Returns its start-up by phase."""
    folder = given.work / "run"
    program = ["benchmarks.startup", "--rank", without] if without else ["finetune.train"]
    before = time.time()
    log = given.work / "log.txt"
    with log.open("w") as output:
        code = run(
            [sys.executable, *launcher, *program, *arguments(given, model, backend, folder)],
            output=output,
            cwd=ROOT,
            timeout=LIMIT,
        )
    if code != 0:
        return {"error": f"exit code {code}: {log.read_text()[-2000:]}"}
    record = json.loads((folder / "run.json").read_text())
    return {
        "start_up": record["start_up"],
        "seconds_to_first_step": record["seconds_to_first_step"],
        "whole_run_seconds": time.time() - before,
        "patches": [one["name"] for one in record["patches"] if one.get("applied")],
        "losses": record["losses"],
        "gpu": record["hardware"]["name"],
    }


def arguments(given: argparse.Namespace, model: Path, backend: str, folder: Path) -> list[str]:
    """Of finetune.train: LoRA on packs, three steps, no evaluation."""
    settings = {
        "model.model_name_or_path": model,
        "model.backend": backend,
        "data.train_file": given.train.resolve(),
        "data.format": "prompt_completion",
        "data.columns": '{"prompt": "question", "completion": "answer"}',
        "data.max_length": 2048,
        "data.packing": "true",
        "training.per_device_train_batch_size": 1,
        "training.global_batch_size": 2,
        "training.max_steps": 3,
        "training.output_dir": folder,
        "training.overwrite_output_dir": "true",
        "logging.generate_samples": 0,
    }
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))] + given.more


def profile(given: argparse.Namespace, model: Path, backend: str) -> None:
    """The functions in which a start spends its time, by cumulative and by own time."""
    stats, place = given.work / "stats", given.work / f"profile-{backend}.txt"
    words = ["-m", "cProfile", "-o", stats, "-m", "finetune.train"]
    with (given.work / "log.txt").open("w") as output:
        run(
            [sys.executable, *words, *arguments(given, model, backend, given.work / "run")],
            output=output,
            cwd=ROOT,
            timeout=LIMIT,
        )
    with place.open("w") as out:
        for order in ("cumulative", "tottime"):
            pstats.Stats(str(stats), stream=out).sort_stats(order).print_stats(150)


def describe(line: dict[str, Any]) -> str:
    """A run in one line."""
    if "error" in line:
        return f"{line['backend']} {line['launcher']}: {line['error']}"
    phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in line["start_up"].items())
    without = f" without {line['without']}" if line["without"] else ""
    name = f"round {line['round']} {line['backend']} {line['launcher']}{without}"
    return f"{name}: {line['seconds_to_first_step']:.1f} s ({phases})"


if __name__ == "__main__":
    raise SystemExit(main())
