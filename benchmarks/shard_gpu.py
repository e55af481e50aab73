"""A sharded model on GPUs: parity with DDP, memory and step time against their prediction, and the bytes of NF4.

    python -m benchmarks.shard_gpu --train train.jsonl --work DIR --out FILE.jsonl [--only CELL,CELL] [--cpu]

Each cell appends one JSON line to FILE, and a cell that has a line without an error is not run again. Cells for two
GPUs are left out where there is one. With --cpu all cells run on a tiny model and gloo ranks.

ops           the copies around FSDP2's all-gather on packed NF4 weights: which change bytes, and the loss with them
bytes         NF4 weights before sharding and after the first gather, for four storage types, on two ranks; if there is
              one GPU both ranks share it through gloo
one           training on one GPU, sharded over one rank and not sharded: losses, step time, memory
loop          full fine-tuning by a plain loop on one rank and on two, which share a GPU if there is one only
dry 8b        dry run of a sharded full fine-tuning of 8 B under a cap of 60 GiB: what is predicted for 2, 4 and 8
slices        a model that fits: the whole measured, and extrapolated from two slices of it
two           training on two GPUs, sharded and with DDP
8b            full fine-tuning of 8 B under a cap of 60 GiB a GPU: one GPU fails, two shard; with its prediction
20b, 20b 8bit full fine-tuning of 20 B on two GPUs, Adam's states in bfloat16, in 8 bits
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import models, processes
from benchmarks.processes import say
from finetune.runtime import bootstrap

ROOT = Path(__file__).parent.parent
CAP_GIB = 60
LIMIT_SECONDS = 540
FULL = ("--model.full_finetuning", "true", "--training.learning_rate", "2e-5")
KINDS = {
    "full": FULL,
    "LoRA": ("--lora.r", "16", "--training.learning_rate", "2e-4"),
    "QLoRA": ("--lora.r", "16", "--training.learning_rate", "2e-4", "--model.load_in_4bit", "true"),
}
KEPT = ("status", "error", "world_size", "losses", "step_seconds_median", "tokens_per_second_per_gpu", "sharding",
        "peak_memory_gib", "prediction", "batch", "seconds_to_first_step", "mfu", "exposed_communication_fraction",
        "hardware")  # fmt: skip


def main() -> int:
    """Run the cells. Returns the exit code: 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="JSON lines with question and answer, as GSM8K")
    parser.add_argument("--work", type=Path, required=True, help="scratch folder")
    parser.add_argument("--out", type=Path, required=True, help="file to append the JSON lines to")
    parser.add_argument("--only", default="", help="names of cells, separated by commas; all if empty")
    parser.add_argument("--shape", default="llama-1.2b", choices=sorted(models.SHAPES), help="of the smaller cells")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    given.work, given.train, given.out = (one.resolve() for one in (given.work, given.train, given.out))
    given.work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("FINETUNE_CACHE", str(given.work / "cache"))
    processes.end_with_this_one()
    given.gpus = 0 if given.cpu else gpus()
    chosen = [name for name in given.only.split(",") if name] or list(CELLS)
    if unknown := [name for name in chosen if name not in CELLS]:
        parser.error(f"unknown cells: {', '.join(unknown)}. Known: {', '.join(CELLS)}")
    failed = False
    for name in chosen:
        needs, call = CELLS[name]
        if name in done(given.out):
            say(f"{name}: has a result")
            continue
        if not given.cpu and needs > given.gpus:
            say(f"{name}: needs {needs} GPUs, {given.gpus} visible")
            continue
        began = time.perf_counter()
        try:
            found = call(given)
        except Failed as error:
            found = {"error": str(error)}
        failed |= "error" in found
        line = {"cell": name, "gpus": given.gpus, "seconds": time.perf_counter() - began} | found
        with given.out.open("a") as out:
            out.write(json.dumps(line | {"versions": bootstrap.versions()}) + "\n")
        say(json.dumps(line, indent=1))
    return int(failed)


class Failed(Exception):
    """A command ended with another exit code than expected; its text is the end of the output."""


def gpus() -> int:
    """Visible GPUs, counted in another process: this one leaves them alone."""
    from finetune.measure.strategy import visible_gpus

    return visible_gpus()


def done(out: Path) -> set[str]:
    """Cells that have a result."""
    lines = out.read_text().splitlines() if out.is_file() else []
    return {one["cell"] for one in map(json.loads, lines) if "error" not in one}


# --- commands ---------------------------------------------------------------------------------------------------------


def rank(
    given: argparse.Namespace,
    ranks: int,
    mode: str,
    request: dict[str, Any],
    words: tuple[str, ...] = (),
    *,
    allowed: tuple[int, ...] = (0,),
    seen: str | None = None,
) -> tuple[int, str]:
    """Run `benchmarks.shard_rank` on that many ranks. Returns the exit code and the output.

    Args:
        seen: CUDA_VISIBLE_DEVICES; by default as many GPUs as ranks, or the one that there is.
    """
    visible = "" if given.cpu else ",".join(map(str, range(min(ranks, given.gpus)))) if seen is None else seen
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks] if ranks else []
    command = [sys.executable, *launcher, "-m", "benchmarks.shard_rank", mode, json.dumps(request), *words]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"CUDA_VISIBLE_DEVICES": visible, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    if not given.cpu:
        env.pop("OMP_NUM_THREADS")
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        code = processes.run([str(word) for word in command], env=env, output=output, timeout=LIMIT_SECONDS)
        output.seek(0)
        said = output.read()
    say(f"  {time.monotonic() - began:4.0f} s, exit {code}: {ranks} x {mode} {' '.join(words[-6:])[:100]}")
    if code not in allowed:
        raise Failed(f"exit {code}: {said[-3000:]}")
    return int(code or 0), said


def found_by(given: argparse.Namespace, ranks: int, mode: str, request: dict[str, Any]) -> dict[str, Any]:
    """What a mode other than `train` writes."""
    out = given.work / f"{mode}-{time.monotonic_ns()}.json"
    rank(given, ranks, mode, request | {"out": str(out)})
    return json.loads(out.read_text())


def model_of(given: argparse.Namespace, shape: str) -> Path:
    """The model of a shape; tiny with --cpu."""
    shape = "llama-1m" if given.cpu else shape
    return models.build(given.work / shape, shape, given.train)


def arguments(given: argparse.Namespace, model: Path, out: Path, *extra: str, steps: int = 12) -> tuple[str, ...]:
    """Of a job with packs and two accumulated micro-batches on two GPUs."""
    pack = "256" if given.cpu else "4096"
    length = ("--data.packing", "true", "--data.max_length", pack, "--data.pack_length", pack)
    return (
        *("--model.model_name_or_path", str(model), "--data.train_file", str(given.train)),
        *("--data.columns", "{instruction: question, output: answer}", *length, "--model.backend", "transformers"),
        *("--training.global_batch_size", "4", "--training.per_device_train_batch_size", "1"),
        *("--training.gradient_checkpointing", "true", "--training.max_steps", str(2 if given.cpu else steps)),
        *("--training.save_steps", "0", "--logging.generate_samples", "0", "--logging.logging_steps", "1"),
        *("--training.output_dir", str(out), "--training.overwrite_output_dir", "true", *extra),
    )


def record(out: Path) -> dict[str, Any]:
    """What run.json has of a run's results."""
    content = json.loads((out / "run.json").read_text())
    return {name: content.get(name) for name in KEPT}


def trained(
    given: argparse.Namespace, ranks: int, model: Path, name: str, *extra: str, steps: int = 12, **request: Any
) -> dict[str, Any]:
    """A run's results; its error if it failed."""
    out = given.work / name.replace(" ", "-")
    (out / "run.json").unlink(missing_ok=True)
    words = arguments(given, model, out, *extra, steps=steps)
    code, said = rank(given, ranks, "train", request, words, allowed=(0, 1))
    if not (out / "run.json").is_file():
        return {"exit": code, "error": said[-2000:]}
    return {"exit": code} | {key: value for key, value in record(out).items() if value is not None}


def predicted(given: argparse.Namespace, model: Path, name: str, *extra: str, **request: Any) -> dict[str, Any]:
    """The report of a dry run of the sharded job, which also keeps the measurement that its run is scored with."""
    out = given.work / f"dry-{name}.json".replace(" ", "-")
    out.unlink(missing_ok=True)
    words = ("--training.strategy", "shard", *extra, "--dry-run", "--json", str(out))
    seen = "" if given.cpu else ",".join(map(str, range(given.gpus)))
    words = arguments(given, model, given.work / "dry", *words)
    _, said = rank(given, 0, "train", request, words, allowed=(0, 1), seen=seen)
    if not out.is_file():
        return {"error": said[-2000:]}
    found = json.loads(out.read_text())
    kept = ("go", "reason", "memory", "step", "sharded", "projection", "micro_batch_search")
    return {key: found.get(key) for key in kept}


def apart(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """How far two runs' losses, times and memory are apart: the second against the first."""
    if "losses" not in one or "losses" not in other:
        return {"error": one.get("error") or other.get("error") or "a run has no losses"}
    ratio = {
        name: other[name] / one[name] if one.get(name) else None
        for name in ("step_seconds_median", "tokens_per_second_per_gpu")
    }
    pairs = list(zip(one["losses"], other["losses"], strict=True))
    return {
        "worst_loss_difference": max(abs(a - b) / abs(a) for a, b in pairs),
        "peak_memory_ratio": max(other["peak_memory_gib"]) / max(one["peak_memory_gib"]),
        "ratio": ratio,
    }


# --- cells ------------------------------------------------------------------------------------------------------------


def ops(given: argparse.Namespace) -> dict[str, Any]:
    """Which copy changes bytes."""
    return found_by(given, 1, "ops", {"model": str(model_of(given, given.shape))})


def stored_bytes(given: argparse.Namespace) -> dict[str, Any]:
    """NF4 through FSDP2 on two ranks."""
    backend = "nccl" if given.gpus > 1 else "gloo"
    return found_by(given, 2, "bytes", {"model": str(model_of(given, given.shape)), "backend": backend})


def one(given: argparse.Namespace) -> dict[str, Any]:
    """One rank, sharded and not."""
    model, found = model_of(given, given.shape), {}
    for kind, extra in KINDS.items():
        plain = trained(given, 1, model, f"one {kind}", *extra)
        sharded = trained(given, 1, model, f"one {kind} shard", *extra, "--training.strategy", "shard", alone=True)
        found[kind] = {"plain": plain, "shard": sharded, "apart": apart(plain, sharded)}
    errors = {kind: one["apart"]["error"] for kind, one in found.items() if "error" in one["apart"]}
    return {"kinds": found} | ({"error": errors} if errors else {})


def loops(given: argparse.Namespace) -> dict[str, Any]:
    """The same rows on one rank and on two."""
    backend = "nccl" if given.gpus > 1 else "gloo"
    small = {"rows": 2, "length": 64, "steps": 3} if given.cpu else {"rows": 8, "length": 1024, "steps": 6}
    request = {"model": str(model_of(given, given.shape)), **small}
    whole = found_by(given, 1, "loop", request | {"backend": "gloo", "sharded": False})
    halves = found_by(given, 2, "loop", request | {"backend": backend, "sharded": True})
    pairs = zip(whole["losses"], halves["losses"], strict=True)
    return {"one": whole, "two": halves, "worst_loss_difference": max(abs(a - b) / abs(a) for a, b in pairs)}


def dry_8b(given: argparse.Namespace) -> dict[str, Any]:
    """What is predicted for a model that does not fit."""
    return {"dry_run": predicted(given, model_of(given, "llama-8b"), "dry 8b", *FULL, cap_gib=CAP_GIB)}


def slices(given: argparse.Namespace) -> dict[str, Any]:
    """A model that fits: the whole measured on one device, and extrapolated from two slices of it."""
    model, found = model_of(given, given.shape), {}
    for kind, extra in KINDS.items():
        reports = {}
        for strategy in ("shard", "single"):
            out = given.work / f"slices-{kind}-{strategy}.json"
            out.unlink(missing_ok=True)
            batch = ("--training.per_device_train_batch_size", "1", "--model.backend", "transformers")
            words = (*extra, *batch, "--training.strategy", strategy, "--dry-run", "--json", str(out))
            arguments_ = arguments(given, model, given.work / "dry", *words)
            _, said = rank(given, 0, "train", {}, arguments_, allowed=(0, 1), seen="" if given.cpu else "0")
            if not out.is_file():
                return {"error": said[-2000:]}
            reports[strategy] = json.loads(out.read_text())["measurement"]
        names = ("peak_memory_bytes", "optimizer_seconds", "parameters", "trainable_parameters")
        pairs = {name: (reports["shard"][name], reports["single"][name]) for name in names}
        pairs["compute_seconds"] = tuple(reports[one]["compute_seconds"]["1"] for one in ("shard", "single"))
        found[kind] = {
            name: {"extrapolated": one, "measured": other, "error": (one - other) / other if other else None}
            for name, (one, other) in pairs.items()
        }
    return {"kinds": found}


def collectives(given: argparse.Namespace) -> None:
    """Measure the collectives of two ranks, which predictions need, once."""
    place = given.work / "comm.json"
    if place.is_file():
        return
    command = [sys.executable, "-m", "finetune.bench", "comm", "--world-sizes", "2", "--runs", "3", "--steps", "20"]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        processes.run([*command, "--json", str(place)], output=output, timeout=LIMIT_SECONDS, cwd=ROOT)


def two(given: argparse.Namespace) -> dict[str, Any]:
    """Two ranks, DDP and sharded, each predicted by a dry run first."""
    model, found = model_of(given, given.shape), {}
    collectives(given)
    for kind, extra in KINDS.items():
        dry = predicted(given, model, kind, *extra)
        ddp = trained(given, 2, model, f"two {kind} ddp", *extra, "--training.strategy", "ddp", steps=20)
        sharded = trained(given, 2, model, f"two {kind} shard", *extra, "--training.strategy", "shard", steps=20)
        found[kind] = {"predicted": dry, "ddp": ddp, "shard": sharded, "apart": apart(ddp, sharded)}
    errors = {kind: one["apart"]["error"] for kind, one in found.items() if "error" in one["apart"]}
    return {"kinds": found} | ({"error": errors} if errors else {})


def eight(given: argparse.Namespace) -> dict[str, Any]:
    """A model that one GPU under the cap cannot train, on two."""
    model = model_of(given, "llama-8b")
    collectives(given)
    dry = predicted(given, model, "8b", *FULL, cap_gib=CAP_GIB)
    alone = trained(given, 1, model, "8b one", *FULL, steps=3, cap_gib=CAP_GIB)
    both = trained(given, 2, model, "8b two", *FULL, "--training.strategy", "shard", steps=20, cap_gib=CAP_GIB)
    found = {"cap_gib": CAP_GIB, "predicted": dry, "one_gpu": alone, "two_gpus": both}
    wrong = both["exit"] != 0 or (not given.cpu and alone["exit"] == 0)
    return found | ({"error": both.get("error") or "one GPU did not run out of memory"} if wrong else {})


def twenty(given: argparse.Namespace, optimizer: str) -> dict[str, Any]:
    """A model that no single GPU can train. Its prediction, then the run."""
    model = model_of(given, "llama-20b")
    collectives(given)
    extra = (*FULL, "--training.optim", optimizer)
    dry = predicted(given, model, f"20b {optimizer}", *extra)
    run = trained(given, 2, model, "20b", *extra, "--training.strategy", "shard", steps=6)
    return {"optimizer": optimizer, "predicted": dry, "run": run} | ({"error": run["error"]} if run["exit"] else {})


CELLS: dict[str, tuple[int, Callable[[argparse.Namespace], dict[str, Any]]]] = {
    "ops": (1, ops),
    "bytes": (1, stored_bytes),
    "one": (1, one),
    "loop": (1, loops),
    "dry 8b": (1, dry_8b),
    "slices": (1, slices),
    "two": (2, two),
    "8b": (2, eight),
    "20b": (2, lambda given: twenty(given, "adamw_torch")),
    "20b 8bit": (2, lambda given: twenty(given, "adamw_torch_8bit")),
}


if __name__ == "__main__":
    raise SystemExit(main())
