"""A sharded model on GPUs: parity with DDP, memory and step time against their prediction, peers.

    python -m benchmarks.shard_gpu --train train.jsonl --work DIR --out FILE [--only CELL,CELL] [--seconds N] [--cpu]

Each cell appends one JSON line to FILE; a cell that has a line without an error is not run again, so the same command
goes on where the last one ended. Cells for two GPUs are left out where there is one. With --seconds no cell is begun
that would end later; each takes less than ten minutes. On a machine that runs commands of ten minutes, repeat this
until it prints "all cells have a result", with WORK on a disk of 120 GiB that stays between the commands:

    python -m benchmarks.shard_gpu --train train.jsonl --work WORK --out WORK/shard.jsonl --seconds 580

With --cpu all cells run on tiny models and gloo ranks, which tests the script: about 25 minutes on two cores.

one KIND      training on one GPU, sharded over one rank and not sharded: losses, step time, memory
loop          full fine-tuning by a plain loop on one rank and on two, which share a GPU if there is one only
dry 8b        dry run of a sharded full fine-tuning of 8 B under a cap of 60 GiB: what is predicted for 2, 4 and 8
slices        a model that fits: the whole measured, and extrapolated from two slices of it
two KIND      training on two GPUs, sharded and with DDP: losses, step time, memory; each predicted by a dry run first.
              The invariants of an adapter compare digests of the frozen weights before sharding and after a gather
resume        a checkpoint of two sharded GPUs resumed on one, of DDP on two sharded ones: losses of the whole runs
8b            full fine-tuning of 8 B under a cap of 60 GiB a GPU: one GPU fails, two shard; with its prediction
peer STACK    full fine-tuning of 8 B on two GPUs, two documents of 4,096 tokens a GPU: ours, Unsloth's FSDP2, and TRL
              with the FSDP2 profile that it ships
peer STACK N  LoRA of 8 B on documents of N tokens, which the two GPUs share: ours, and TRL with accelerate's context
              parallelism
peer STACK moe  full fine-tuning of 16 layers of Qwen3-30B-A3B and documents of real lengths; TRL without float32 copies
              of the weights, which the profile makes and two GPUs of 80 GB do not hold
20b, 20b 8bit full fine-tuning of 20 B on two GPUs, Adam's states in bfloat16, in 8 bits; only the weights are saved
70b           QLoRA of 70 B on two GPUs under a cap of 40 GiB a GPU
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks import models, processes
from benchmarks.peers import cells, rows
from benchmarks.processes import say
from finetune.runtime import bootstrap

ROOT = Path(__file__).parent.parent
CAP_GIB, CAP_4BIT_GIB = 60, 40
LIMIT_SECONDS = 540
SHARD = ("--training.strategy", "shard")
LARGE = ("llama-20b", "llama-70b-nf4")  # of which the disk holds one
FULL = ("--model.full_finetuning", "true", "--training.learning_rate", "2e-5")
KINDS = {
    "full": FULL,
    "LoRA": ("--lora.r", "16", "--training.learning_rate", "2e-4"),
    "QLoRA": ("--lora.r", "16", "--training.learning_rate", "2e-4", "--model.load_in_4bit", "true"),
}
KEPT = ("status", "error", "world_size", "losses", "step_seconds_median", "tokens_per_second_per_gpu", "sharding",
        "peak_memory_gib", "prediction", "batch", "seconds_to_first_step", "start_up", "mfu",
        "exposed_communication_fraction", "hardware", "invariants", "backend", "attention",
        "layer_kernels")  # fmt: skip


def main() -> int:
    """Run the cells. Returns the exit code: 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="JSON lines with question and answer, as GSM8K")
    parser.add_argument("--work", type=Path, required=True, help="scratch folder")
    parser.add_argument("--out", type=Path, required=True, help="file to append the JSON lines to")
    parser.add_argument("--only", default="", help="names of cells, separated by commas; all if empty")
    parser.add_argument("--shape", default="llama-1.2b", choices=sorted(models.SHAPES), help="of the smaller cells")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no cell that would end later")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    given.until = time.monotonic() + given.seconds
    given.work, given.train, given.out = (one.resolve() for one in (given.work, given.train, given.out))
    given.work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("FINETUNE_CACHE", str(given.work / "cache"))
    processes.end_with_this_one()
    given.gpus = 0 if given.cpu else gpus()
    chosen = [name for name in given.only.split(",") if name] or list(CELLS)
    if unknown := [name for name in chosen if name not in CELLS]:
        parser.error(f"unknown cells: {', '.join(unknown)}. Known: {', '.join(CELLS)}")
    wrong, left = False, []
    for name in chosen:
        needs, takes, call = CELLS[name]
        if name in done(given.out):
            say(f"{name}: has a result")
            continue
        if not given.cpu and needs > given.gpus:
            say(f"{name}: needs {needs} GPUs, {given.gpus} visible")
            continue
        if time.monotonic() + takes > given.until:
            left.append(name)
            continue
        began = time.perf_counter()
        try:
            found = call(given)
        except Failed as error:
            found = {"error": str(error)}
        wrong |= "error" in found
        line = {"cell": name, "gpus": given.gpus, "seconds": time.perf_counter() - began} | found
        with given.out.open("a") as out:
            out.write(json.dumps(line | {"versions": bootstrap.versions()}) + "\n")
        say(json.dumps(line, indent=1))
    if left:
        say(f"Not begun, for lack of time: {', '.join(left)}. Start the same command again.")
    elif not wrong:
        say("all cells have a result")
    return int(wrong or bool(left))


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
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, "-m", "benchmarks.shard_rank", *words]
    shown = f"{ranks} x {mode} {' '.join(words[-6:])[:100]}"
    asked = json.dumps(request | {"mode": mode})
    return started(given, command, shown, seen=visible, allowed=allowed, SHARD_REQUEST=asked)


def started(
    given: argparse.Namespace,
    command: list[str],
    shown: str,
    *,
    seen: str,
    allowed: tuple[int, ...] = (0,),
    **variables: str,
) -> tuple[int, str]:
    """Run a command on the GPUs `seen`. Returns the exit code and the output."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"CUDA_VISIBLE_DEVICES": seen, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | variables
    if not given.cpu:
        env.pop("OMP_NUM_THREADS")
    began = time.monotonic()
    limit = max(min(LIMIT_SECONDS, given.until - began), 1.0)
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        code = processes.run(command, env=env, output=output, timeout=limit)
        output.seek(0)
        said = output.read()
    say(f"  {time.monotonic() - began:4.0f} s, exit {code}: {shown}")
    if code not in allowed:
        raise Failed(f"exit {code}: {cause(said)}")
    return int(code or 0), said


def cause(said: str) -> str:
    """The end of what the first rank that failed has printed, without what its launcher says of that."""
    own, _, _ = said.partition("torch/distributed/elastic")
    return own.strip()[-2500:] or said[-2500:]


def found_by(given: argparse.Namespace, ranks: int, mode: str, request: dict[str, Any]) -> dict[str, Any]:
    """What a mode other than `train` writes."""
    out = given.work / f"{mode}-{time.monotonic_ns()}.json"
    rank(given, ranks, mode, request | {"out": str(out)})
    return json.loads(out.read_text())


def model_of(given: argparse.Namespace, shape: str) -> Path:
    """The model of a shape; tiny with --cpu. Of the largest ones the disk holds one: it replaces the other."""
    if given.cpu:
        shape = "llama-1.2m-nf4" if shape.endswith("-nf4") else "qwen3-moe-1m" if "moe" in shape else "llama-1.2m"
    for other in LARGE if shape in LARGE else ():
        if other != shape:
            shutil.rmtree(given.work / other, ignore_errors=True)
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
        return {"exit": code, "error": cause(said)}
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
        return {"error": cause(said)}
    found = json.loads(out.read_text())
    kept = ("go", "reason", "memory", "step", "sharded", "projection", "micro_batch_search")
    return {key: found.get(key) for key in kept}


def apart(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """How far two runs' losses, times and memory are apart: the second against the first."""
    if "losses" not in one or "losses" not in other:
        return {"error": one.get("error") or other.get("error") or "a run has no losses"}
    ratio = {
        name: other[name] / one[name] if one.get(name) and other.get(name) else None
        for name in ("step_seconds_median", "tokens_per_second_per_gpu")
    }
    pairs = list(zip(one["losses"], other["losses"], strict=True))
    return {
        "worst_loss_difference": max(abs(a - b) / abs(a) for a, b in pairs),
        "peak_memory_ratio": max(other["peak_memory_gib"]) / max(one["peak_memory_gib"]),
        "ratio": ratio,
    }


# --- cells ------------------------------------------------------------------------------------------------------------


def one(given: argparse.Namespace, kind: str) -> dict[str, Any]:
    """One rank, sharded and not."""
    model, extra = model_of(given, given.shape), KINDS[kind]
    plain = trained(given, 1, model, f"one {kind}", *extra)
    sharded = trained(given, 1, model, f"one {kind} shard", *extra, *SHARD, alone=True)
    return compared({"plain": plain, "shard": sharded}, apart(plain, sharded))


def compared(runs: dict[str, Any], difference: dict[str, Any]) -> dict[str, Any]:
    """Runs and how far they are apart; the cell has failed if one of them has."""
    return {**runs, "apart": difference} | failed(*runs.values(), difference)


def failed(*parts: dict[str, Any]) -> dict[str, Any]:
    """The first error of a cell's parts, as the cell's; empty without one."""
    return next(({"error": part["error"]} for part in parts if part.get("error")), {})


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
    dry = predicted(given, model_of(given, "llama-8b"), "dry 8b", *FULL, cap_gib=CAP_GIB)
    return {"dry_run": dry} | failed(dry)


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
                return {"error": cause(said)}
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


def two(given: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Two ranks, DDP and sharded, each predicted by a dry run first."""
    model, extra = model_of(given, given.shape), KINDS[kind]
    collectives(given)
    dry = predicted(given, model, kind, *extra)
    ddp = trained(given, 2, model, f"two {kind} ddp", *extra, "--training.strategy", "ddp", steps=20)
    sharded = trained(given, 2, model, f"two {kind} shard", *extra, *SHARD, steps=20)
    return compared({"predicted": dry, "ddp": ddp, "shard": sharded}, apart(ddp, sharded))


def resume(given: argparse.Namespace) -> dict[str, Any]:
    """Half of a run with another strategy and number of GPUs, against the whole one."""
    model, found = model_of(given, given.shape), {}
    half, steps = 10, 20
    kept = (*FULL, "--training.save_steps", str(half), "--training.max_steps", str(steps))
    sharded, ddp = SHARD, ("--training.strategy", "ddp")
    for name, first, second, ranks in (("shard to one", sharded, (), 1), ("ddp to shard", ddp, sharded, 2)):
        whole = trained(given, 2, model, f"{name} whole", *kept, *first)
        source, target = (given.work / f"{name} {part}".replace(" ", "-") for part in ("whole", "half"))
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        shutil.move(source / f"checkpoint-{half}", target)
        again = ("--training.resume_from_checkpoint", "true", "--training.overwrite_output_dir", "false")
        rest = trained(given, ranks, model, f"{name} half", *kept, *second, *again)
        if "losses" in whole and "losses" in rest:
            whole = whole | {"all_losses": whole["losses"], "losses": whole["losses"][half:]}
        found[name] = compared({"whole": whole, "resumed": rest}, apart(whole, rest))
        for folder in (source, target):
            shutil.rmtree(folder)
    errors = {name: one["error"] for name, one in found.items() if "error" in one}
    return found | ({"error": errors} if errors else {})


def peer(
    given: argparse.Namespace, stack: str, shape: str = "llama-8b", kind: str = "4096", context: int = 1
) -> dict[str, Any]:
    """Tokens/s of a stack on two GPUs, by the clock of `benchmarks.peers`: of a model that is sharded and trained in
    full on rows of 4,096 tokens, or of real lengths up to 2,048, in packs of 16,384 or, as peers take them by default,
    32 padded rows; with a `context` of 2, of a LoRA on rows that the GPUs share. On a CPU Unsloth does not shard."""
    from transformers import AutoTokenizer

    if given.cpu and stack == "trl":
        return {"skipped": "TRL's loss needs Triton"}

    model, longest = model_of(given, shape), 256 if given.cpu else cells.LONGEST[kind]
    data = given.work / f"rows-{kind}.jsonl"
    rows.build(data, kind, longest, AutoTokenizer.from_pretrained(model), given.train)
    batch, length = (32, longest) if kind == "real" else (1 if context > 1 else 2, longest)
    if stack == "ours" and kind == "real":  # padded rows of 16,384 tokens in all are four times as many
        batch, length = 1, 8 * longest
    mixed = "moe" not in shape  # float32 weights beside the bfloat16 ones
    strategy = SHARD if context == 1 else ("--training.context_parallel", str(context), "--model.tiled_mlp", "true")
    words = [*strategy, "--model.backend", "transformers", "--data.pack_length", str(length)]
    steps, skipped = (3, 1) if context > 1 else (4, 2) if given.cpu else (16, 6)
    request = {
        "stack": stack, "model": str(model), "rows": str(data), "cache": str(given.work / "datasets"),
        "work": str(given.work / f"peer-{stack}"), "method": "full" if context == 1 else "lora", "packing": False,
        "learning_rate": 2e-5, "settings": [{"batch": batch, "length": length, "accumulation": 1,
                                             "checkpointing": True}],
        "steps": steps, "skipped": skipped, "trial_steps": 0, "started": time.time(),
        "options": {"words": words, "mixed": mixed} | ({"pad_to_multiple_of": 2 * context} if context > 1 else {}),
    }  # fmt: skip
    asked, answer = (given.work / f"peer-{stack}-{kind}-{what}.json" for what in ("asked", "answer"))
    asked.write_text(json.dumps(request))
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    if stack == "trl":
        profile = given.work / "fsdp2.yaml"
        content = yaml.safe_load((Path(trl_folder()) / "accelerate_configs" / "fsdp2.yaml").read_text())
        if context > 1:
            degrees = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "cp": context}
            content["parallelism_config"] = {f"parallelism_config_{name}_size": n for name, n in degrees.items()}
        if not mixed:
            content["mixed_precision"] = "no"
        profile.write_text(yaml.safe_dump(content | {"num_processes": 2, "use_cpu": given.cpu}))
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(profile)]
        command += ["--main_process_port", "0"]
    variables = {"UNSLOTH_FSDP2": "1"} if stack == "unsloth" and not given.cpu else {}
    command += ["-m", "benchmarks.peers.rank", str(asked), str(answer)]
    seen = "" if given.cpu else "0,1"
    _, said = started(given, command, f"peer {stack}", seen=seen, allowed=(0, 1), **variables)
    return json.loads(answer.read_text()) if answer.is_file() else {"error": cause(said)}


def trl_folder() -> str:
    """Where TRL is installed; it is not imported."""
    import importlib.util

    found = importlib.util.find_spec("trl")
    assert found is not None and found.submodule_search_locations
    return found.submodule_search_locations[0]


def eight(given: argparse.Namespace) -> dict[str, Any]:
    """A model that one GPU under the cap cannot train, on two."""
    model = model_of(given, "llama-8b")
    collectives(given)
    dry = predicted(given, model, "8b", *FULL, cap_gib=CAP_GIB)
    alone = trained(given, 1, model, "8b one", *FULL, steps=3, cap_gib=CAP_GIB)
    both = trained(given, 2, model, "8b two", *FULL, *SHARD, steps=20, cap_gib=CAP_GIB)
    found = {"cap_gib": CAP_GIB, "predicted": dry, "one_gpu": alone, "two_gpus": both}
    if not given.cpu and alone["exit"] == 0:
        return found | {"error": "one GPU did not run out of memory"}
    return found | failed(dry, both)


def twenty(given: argparse.Namespace, optimizer: str) -> dict[str, Any]:
    """A model that no single GPU can train. Its prediction, then the run, which saves the weights alone."""
    model = model_of(given, "llama-20b")
    collectives(given)
    extra = (*FULL, "--training.optim", optimizer)
    dry = predicted(given, model, f"20b {optimizer}", *extra)
    run = trained(given, 2, model, "20b", *extra, *SHARD, steps=6)
    found = {"optimizer": optimizer, "predicted": dry, "run": run, "saved": saved(given.work / "20b", model)}
    return found | failed(dry, run)


def saved(out: Path, model: Path) -> dict[str, Any]:
    """Numbers in the files of a final model and of the one that it was made of; the disk has no room to keep it."""
    from finetune.measure import held

    counts = [found.total if (found := held.read_sizes(folder)) else 0 for folder in (out, model)]
    files = sorted(out.glob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    for file in files:
        file.unlink()
    return {"files": len(files), "bytes": sum(sizes), "parameters": counts[0], "as_the_model": counts[0] == counts[1]}


def seventy(given: argparse.Namespace) -> dict[str, Any]:
    """QLoRA of a model whose 4-bit weights alone do not fit under the cap on one GPU."""
    model = model_of(given, "llama-70b-nf4")
    run = trained(given, 2, model, "70b", *KINDS["QLoRA"], *SHARD, steps=4, cap_gib=CAP_4BIT_GIB)
    return {"cap_gib": CAP_4BIT_GIB, "run": run} | failed(run)


def built(given: argparse.Namespace, shape: str) -> dict[str, Any]:
    """A large model, written before the cells that need it."""
    folder = model_of(given, shape)
    return {"bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors"))}


Call = Callable[[argparse.Namespace], dict[str, Any]]
# GPUs, seconds that it may take, and what it does.
CELLS: dict[str, tuple[int, float, Call]] = {
    **{f"one {kind}": (1, 200, partial(one, kind=kind)) for kind in KINDS},
    "loop": (1, 180, loops),
    "slices": (1, 400, slices),
    **{f"two {kind}": (2, 300, partial(two, kind=kind)) for kind in KINDS},
    "resume": (2, 400, resume),
    "build 8b": (1, 200, partial(built, shape="llama-8b")),
    "dry 8b": (1, 300, dry_8b),
    "8b": (2, 540, eight),
    **{f"peer {stack}": (2, 400, partial(peer, stack=stack)) for stack in ("ours", "unsloth", "trl")},
    **{
        f"peer {stack} moe": (2, 300, partial(peer, stack=stack, shape="qwen3-moe-16", kind="real"))
        for stack in ("ours", "trl")
    },
    **{
        f"peer {stack} {kind}": (2, 300, partial(peer, stack=stack, shape="llama-8b-long", kind=kind, context=2))
        for stack in ("ours", "trl")
        for kind in cells.LONG
    },
    "build 20b": (1, 400, partial(built, shape="llama-20b")),
    "20b 8bit": (2, 560, partial(twenty, optimizer="adamw_torch_8bit")),
    "20b": (2, 560, partial(twenty, optimizer="adamw_torch")),
    "build 70b": (1, 500, partial(built, shape="llama-70b-nf4")),
    "70b": (2, 560, seventy),
}


if __name__ == "__main__":
    raise SystemExit(main())
