"""What the dashboard costs on GPUs and whether it is right: cost, phases against a trace, a slowed rank, fixtures.

    python -m benchmarks.dashboard_gpu --train train.jsonl --work DIR --out FOLDER [--only NAME]

Runs training processes on all GPUs of this machine and writes one JSON file per measurement, and the folders of the
runs that `finetune review` is to judge (without models), to FOLDER.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import models

CELLS: dict[str, tuple[str, int, str, list[str]]] = {
    # name: what is planted, GPUs, model, arguments
    "cost 1.2b": ("cost", 2, "llama-1.2b", ["--data.packing", "true", "--data.max_length", "16384",
                  "--training.global_batch_size", "2", "--training.max_steps", "962", "--model.backend", "unsloth",
                  "--training.gradient_checkpointing", "false"]),
    "cost 190m": ("cost", 2, "llama-190m", ["--data.packing", "true", "--data.max_length", "2048",
                  "--training.global_batch_size", "2", "--training.max_steps", "962", "--model.backend", "unsloth"]),
    "trace": ("trace", 2, "llama-1.2b", ["--data.packing", "true", "--data.max_length", "16384",
              "--training.global_batch_size", "2", "--training.max_steps", "44", "--model.backend", "unsloth",
              "--training.gradient_checkpointing", "false"]),
    "trace full": ("trace", 2, "llama-1.2b", ["--data.packing", "true", "--data.max_length", "8192",
                   "--training.global_batch_size", "2", "--training.max_steps", "44",
                   "--model.backend", "transformers", "--model.full_finetuning", "true",
                   "--training.gradient_checkpointing", "false"]),
    "slow rank": ("slow", 2, "llama-1.2b", ["--data.packing", "true", "--data.max_length", "8192",
                  "--training.global_batch_size", "4", "--training.max_steps", "60", "--model.backend", "unsloth"]),
    "healthy two": ("plain", 2, "llama-1.2b", ["--data.packing", "true", "--data.max_length", "16384",
                    "--training.global_batch_size", "4", "--training.max_steps", "80", "--model.backend", "unsloth"]),
    "healthy one": ("plain", 1, "llama-1.2b", ["--data.packing", "true", "--data.max_length", "16384",
                    "--training.global_batch_size", "2", "--training.max_steps", "60", "--model.backend", "unsloth"]),
    "memory": ("ballast", 1, "llama-190m", ["--data.packing", "true", "--data.max_length", "4096",
               "--training.global_batch_size", "4", "--training.max_steps", "60", "--model.backend", "transformers"]),
    "host bound": ("plain", 1, "llama-190m", ["--data.packing", "false", "--data.max_length", "512",
                   "--training.global_batch_size", "1", "--training.max_steps", "150",
                   "--model.backend", "transformers"]),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--train", type=Path, required=True, help="JSON lines with question and answer, as GSM8K")
    parser.add_argument("--work", type=Path, required=True, help="scratch folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--only", default="", help="cells, separated by commas; all if empty")
    parser.add_argument("--gpus", type=int, default=2, help="no cell uses more than this many")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    wanted = [name for name in CELLS if not given.only or name in given.only.split(",")]
    for name in wanted:
        began = time.monotonic()
        code = run(name, given)
        sys.stdout.write(json.dumps({"cell": name, "code": code, "seconds": round(time.monotonic() - began, 1)}) + "\n")
        sys.stdout.flush()


def run(name: str, given: argparse.Namespace) -> int:
    """One cell, to its end."""
    kind, gpus, shape, arguments = CELLS[name]
    gpus = min(gpus, given.gpus)
    model = models.build(given.work / shape, shape, given.train)
    slug = name.replace(" ", "-")
    out = given.work / slug
    given.out.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(gpus)),
        *("-m", "benchmarks.dashboard_rank", kind, str((given.out / f"{slug}.json").resolve())),
        *("--model.model_name_or_path", str(model), "--training.output_dir", str(out)),
        *("--data.train_file", str(given.train), "--data.columns", "{instruction: question, output: answer}"),
        *("--training.overwrite_output_dir", "true"),
        *("--logging.generate_samples", "0", "--logging.logging_steps", "8" if kind == "trace" else "10"),
        *("--training.save_steps", "0", *arguments),
    ]
    with (given.out / f"{slug}.log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=log, check=False, timeout=400).returncode
    kept = given.out / slug
    shutil.copytree(out / "runs", kept / "runs", dirs_exist_ok=True)
    shutil.copy(out / "run.json", kept / "run.json")
    review = [sys.executable, "-m", "finetune", "review", str(kept), "--json", str(given.out / f"{slug}-review.json")]
    subprocess.run(review, check=False, stdout=subprocess.DEVNULL)
    return code


if __name__ == "__main__":
    main()
