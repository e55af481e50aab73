"""What holding gradients once is worth: peak memory of two ranks that train a small Llama in full, with and without.

    python -m benchmarks.gradients_once --train train.jsonl --work WORK --out OUT.json

Two processes of this machine (gloo on a CPU, NCCL on two GPUs), four steps of two micro-batches each, on each backend:
as the trainer does it, and without `DdpBuckets.before_micro_batch` (docs/defects.md, D9).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import models, processes

SHAPE = "llama-190m"
SCRIPT = """
import os, sys
from finetune import train
from finetune.engine.session import building
from finetune.engine.training.ddp_buckets import DdpBuckets

build = building.build_trainer


def build_as_torch_does(*arguments):
    built = build(*arguments)
    if os.environ["ONCE"] == "0":
        DdpBuckets.before_micro_batch = lambda self, model, *, reduces: None
    return built


building.build_trainer = build_as_torch_does
sys.exit(train.main())
"""


def main() -> int:
    """Four runs; a line and a part of the record after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--train", "--work", "--out"):
        parser.add_argument(name, type=Path, required=True)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    model = models.build(options.work / SHAPE, SHAPE, options.train)
    (options.work / "as_torch.py").write_text(SCRIPT)
    results: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.machine(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "trl", "unsloth")},
        "runs": [],
    }
    for backend in ("unsloth", "transformers"):
        for once in (True, False):
            run = train(options, model, backend, once)
            kept = {name: run[name] for name in ("peak_memory_gib", "losses", "dtype", "batch")}
            results["runs"].append({"backend": backend, "held_once": once} | kept)
            options.out.write_text(json.dumps(results, indent=1) + "\n")
            processes.say(f"{backend}, {'once' if once else 'as torch does it'}: {run['peak_memory_gib']} GiB")
    return 0


def train(options: argparse.Namespace, model: Path, backend: str, once: bool) -> dict[str, Any]:
    """run.json of two ranks."""
    out, log = options.work / "out", options.work / "log.txt"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
        *(options.work / "as_torch.py", "--model.model_name_or_path", model, "--data.train_file", options.train),
        *("--data.columns", "{instruction: question, output: answer}", "--data.max_length", "48"),
        *("--model.backend", backend, "--model.full_finetuning", "true", "--training.learning_rate", "1e-5"),
        *("--training.global_batch_size", "4", "--training.per_device_train_batch_size", "1"),
        *("--training.max_steps", "4", "--training.save_steps", "0", "--logging.generate_samples", "0"),
        *("--training.output_dir", out, "--training.overwrite_output_dir", "true"),
    ]
    root = str(Path(__file__).parent.parent)
    env = {**os.environ, "ONCE": str(int(once)), "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    with log.open("w") as output:
        code = processes.run(command, env=env, output=output, timeout=600)
    if code:
        raise SystemExit(log.read_text()[-3000:])
    return json.loads((out / "run.json").read_text())


if __name__ == "__main__":
    raise SystemExit(main())
