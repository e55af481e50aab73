"""An addition to the study: LoRA of language models of realistic size, random weights."""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from finetune.bench import step
from finetune.errors import RunError
from finetune.runtime import subprocesses
from finetune.runtime.command import console
from finetune.runtime.machine.hardware import Hardware
from finetune.runtime.types import JsonObject

SHAPES = ("llama-1.2b", "llama-3b")  # of benchmarks/models.py
MOST_RUNS, MOST_STEPS = 3, 20  # steps take about a hundred times as long as those of the dense models
PACK = 16384  # tokens
DOCUMENTS = 4000


def measure(
    shapes: Sequence[str],
    world_sizes: Sequence[int],
    modes: Sequence[tuple[str, dict[str, str]]],
    runs: int,
    steps: int,
    machine: Hardware,
    keep: Callable[[JsonObject], None],
) -> JsonObject:
    """Time steps of the real trainer: LoRA r16 in bfloat16 on packs of 16,384 tokens. The global batch is one pack per
    rank at the largest world size. `keep` is called with the results so far after each measurement.

    Returns:
        {"rows": [...]}, or {"left_out": reason}.

    Raises:
        RunError: a model could not be written, or a rank failed.
    """
    if machine.device != "cuda":
        return {"left_out": "there is no GPU, and a step of these models takes minutes on a CPU"}
    runs, steps = min(runs, MOST_RUNS), min(steps, MOST_STEPS)
    found: JsonObject = {"runs": runs, "steps": steps, "pack_tokens": PACK, "rows": []}
    with tempfile.TemporaryDirectory(prefix="bench-lora-") as folder:
        corpus = documents(Path(folder) / "train.jsonl")
        for shape in shapes:
            arguments = configuration(build(shape, corpus, Path(folder)), corpus, max(world_sizes))
            several = [(name, world, one) for name, one in modes for world in world_sizes if world > 1]
            alone = None
            for name, world, environment in [("one GPU", 1, {}), *several]:
                run = step.measure(arguments, world, runs, steps, environment, machine=machine)
                alone = alone or run
                found["rows"].append(row(shape, name, run, alone))
                keep(found)
    return found


def row(shape: str, mode: str, run: JsonObject, alone: JsonObject) -> JsonObject:
    """The row of a run, with its efficiency relative to one GPU."""
    return {
        "shape": shape,
        "mode": mode,
        "world_size": run["world_size"],
        "tokens_per_second_per_gpu": run["tokens_per_second_per_gpu"],
        "efficiency": run["tokens_per_second_per_gpu"] / alone["tokens_per_second_per_gpu"],
        "step_seconds": run["ranks"][0]["seconds"]["step"],
        "exposed_communication_fraction": run["exposed_communication_fraction"],
        "memory_gib": max(one["peak_memory_gib"] for one in run["ranks"]),
        "trainable_parameters": run["trainable_parameters"],
        "conditions": run["conditions"],
        "ranks": run["ranks"],
    }


def configuration(model: Path, corpus: Path, packs: int) -> list[str]:
    """Configuration arguments of the run."""
    return [
        *("--model.model_name_or_path", str(model), "--data.train_file", str(corpus), "--lora.r", "16"),
        *("--data.packing", "true", "--data.pack_length", str(PACK), "--training.per_device_train_batch_size", "1"),
        *("--training.global_batch_size", str(packs), "--training.gradient_checkpointing", "false"),
    ]


def documents(path: Path) -> Path:
    """Write documents of random words, as long as chat data: lognormal(6, 0.8) words, 32 to 2,048."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 7))) for _ in range(2000)]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(DOCUMENTS):
            length = min(2048, max(32, int(rng.lognormvariate(6.0, 0.8))))
            file.write(json.dumps({"text": " ".join(rng.choices(words, k=length))}) + "\n")
    return path


def build(shape: str, corpus: Path, folder: Path) -> Path:
    """Write the model to disk in another process, so that this one does not use the GPUs."""
    command = [sys.executable, "-m", "benchmarks.models", str(folder / shape), shape, str(corpus)]
    with console().status(f"writing a model of shape {shape}"):
        done = subprocesses.run(command)
    if done.returncode:
        raise RunError(f"a model of shape {shape} could not be written: {done.stderr[-2000:]}")
    return folder / shape
