"""Does this package learn as well as TRL? Pretrained models on GSM8K, judged alike by one program.

    python -m benchmarks.quality.models smollm2 --out MODELS
    python -m benchmarks.quality --models MODELS --data GSM8K --work DIR --out quality.jsonl
    python -m benchmarks.quality --report quality.jsonl

GSM8K has train.jsonl and test.jsonl with the fields question and answer: github.com/openai/grade-school-math, in
grade_school_math/data (MIT). A cell is a stack, a mode and packed or padded rows; each of its seeds is one line of the
record. Tokens per step, steps, learning rate, schedule and masks are equal, and each stack has the micro-batch that
suits it. Lines that are there are not run again, except failed ones.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.peers.__main__ import ROOT, machine
from benchmarks.processes import end_with_this_one, run, say, side_by_side
from benchmarks.quality import cells, report, rows
from benchmarks.quality.cells import CELLS, MODELS, Cell
from finetune.runtime import bootstrap

Place = tuple[int, list[str]]  # the number of a job, and its GPUs as CUDA_VISIBLE_DEVICES names them
LIMIT = 540  # seconds of one training or judgment
SMOKE_ROWS, SMOKE_EPOCHS, SMOKE_PACK = 4, 4, 256


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the record lacks. Returns the exit code: 1 if a run failed, or a check of the smoke run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="folder with smollm2/, qwen/ and gemma/, as the cells need them")
    parser.add_argument("--data", type=Path, help="folder with train.jsonl and test.jsonl of GSM8K")
    parser.add_argument("--work", type=Path, help="scratch folder")
    parser.add_argument("--out", type=Path, help="the record: JSON lines")
    parser.add_argument("--cells", help="separated by commas: " + ", ".join(CELLS))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs at a time, spread over the GPUs; their times are void"
    )
    parser.add_argument("--judge-last", action="store_true", help="train all, then judge several at a time")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no run is started")
    parser.add_argument("--exact", type=int, help="held-out rows to answer; default 200, without a GPU 0")
    parser.add_argument("--micro", type=int, help="rows or packs of a micro-batch, instead of the cell's")
    parser.add_argument(
        "--smoke", action="store_true", help="a few steps on sums, on a CPU; needs only --models, --work"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="print a record as a table, and do nothing else")
    given = parser.parse_args(argv)
    if given.report:
        say(report.table(report.read(given.report)))
        return 0
    needed = ("models", "work") if given.smoke else ("models", "data", "work", "out")
    if missing := [f"--{name}" for name in needed if getattr(given, name) is None]:
        parser.error(f"missing: {', '.join(missing)}")
    names = [name.strip() for name in given.cells.split(",")] if given.cells else cells.SMOKE if given.smoke else CELLS
    if unknown := [name for name in names if name not in CELLS]:
        parser.error(f"--cells {', '.join(unknown)}: unknown; a cell is one of {', '.join(CELLS)}")
    end_with_this_one()
    from transformers import AutoTokenizer  # noqa: F401  # several threads must not be the first to import it

    given.work = given.work.resolve()
    given.work.mkdir(parents=True, exist_ok=True)
    given.machine = machine()
    given.gpus = [] if given.smoke else visible(len(given.machine["gpus"]))
    given.exact = (200 if given.gpus else 0) if given.exact is None else given.exact
    if given.smoke:
        given.data, given.seeds, given.out = given.work, "1", given.work / "smoke.jsonl"
        given.jobs = os.cpu_count() or 1
        given.out.unlink(missing_ok=True)
        rows.write(given.work / "train.jsonl", rows.sums(SMOKE_ROWS, 1))
        rows.write(given.work / "test.jsonl", rows.sums(8, 2))
    done = {(one["cell"], one["seed"]) for one in report.read(given.out) if "error" not in one}
    wanted = [(CELLS[name], seed) for seed in map(int, given.seeds.split(",")) for name in names]
    first = wanted[0][1]
    wanted = [(cell, seed) for cell, seed in wanted if (cell.stack or seed == first) and (cell.name, seed) not in done]
    for cell, _ in wanted:
        folder = given.models / cell.model
        if not (folder / "config.json").is_file():
            parser.error(f"{folder} is missing: python -m benchmarks.quality.models {cell.model} --out {given.models}")
    given.rows_of_step = {name: rows_of_step(name, given) for name in sorted({cell.model for cell, _ in wanted})}
    failed, later, lock, deadline = [], [], threading.Lock(), time.monotonic() + given.budget

    def write(cell: Cell, seed: int, line: dict[str, Any]) -> None:
        with lock:
            with given.out.open("a") as record:
                record.write(json.dumps(line) + "\n")
            if "error" in line:
                failed.append(line)
            say(f"{cell.name}, seed {seed}: " + (line["error"][-1] if "error" in line else f"loss {line['loss']:.4f}"))

    def finish(cell: Cell, seed: int, line: dict[str, Any], place: Place) -> None:
        write(cell, seed, line | judge(cell, seed, place, given))

    def one(cell: Cell, seed: int, alone: bool, place: Place) -> None:
        if time.monotonic() > deadline:
            return
        line = {"cell": cell.name, "seed": seed, "alone": alone} | train(cell, seed, place, given)
        if "error" in line:
            write(cell, seed, line)
        elif given.judge_last:
            say(f"{cell.name}, seed {seed}: trained, {line.get('seconds', 0):.1f} s from the shell to the end")
            later.append((cell, seed, line))
        else:
            finish(cell, seed, line, place)

    several = [(cell, seed) for cell, seed in wanted if cell.ranks > 1]
    single = [pair for pair in wanted if pair not in several]
    places = [(slot, given.gpus[slot % len(given.gpus) :][:1] if given.gpus else []) for slot in range(given.jobs)]
    if single:
        side_by_side({(c.name, s): functools.partial(one, c, s, given.jobs == 1) for c, s in single}, places)
    for cell, seed in several:
        if len(given.gpus) < cell.ranks:
            say(f"{cell.name}: needs {cell.ranks} GPUs")
        else:
            one(cell, seed, True, (0, given.gpus[: cell.ranks]))
    if later:  # what is judged needs no machine to itself: three at a time on each GPU
        places = [(slot, [gpu]) for slot, gpu in enumerate(3 * given.gpus)] or [(0, [])]
        side_by_side({(c.name, s): functools.partial(finish, c, s, line) for c, s, line in later}, places)
    lines = report.read(given.out)
    say(report.table(lines))
    return int(bool(failed) or (given.smoke and not smoke_passed(lines)))


def visible(count: int) -> list[str]:
    """The GPUs to use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(number) for number in range(count)] if named is None else [one for one in named.split(",") if one]


def train(cell: Cell, seed: int, place: Place, given: argparse.Namespace) -> dict[str, Any]:
    """Train in a process of its own: what was measured, or the end of the log."""
    folder = folder_of(cell, seed, given)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    request, gpus = settings(cell, seed, folder, given), place[1]
    about = {"micro": request["micro"]} if cell.stack and request["micro"] else {}
    about |= {"date": given.machine["date"], "gpus": [given.machine["gpus"][0]] * len(gpus) if gpus else []}
    about |= {"versions": bootstrap.versions()}
    if not cell.stack:
        return about
    asked, trained = folder / "request.json", folder / "trained.json"
    asked.write_text(json.dumps(request))
    started = time.monotonic()
    error = process(command(cell, request, folder, asked, trained), folder, place, given)
    seconds = time.monotonic() - started
    if error:
        return about | {"error": error}
    found = ours(Path(request["out"])) if cell.stack == "ours" else json.loads(trained.read_text())
    return about | found | {"seconds": seconds}


def judge(cell: Cell, seed: int, place: Place, given: argparse.Namespace) -> dict[str, Any]:
    """Judge what `train` has left, in a process of its own: the losses, or the end of the log."""
    folder = folder_of(cell, seed, given)
    request = settings(cell, seed, folder, given)
    asked, judged, merged = (folder / name for name in ("judge.json", "judged.json", "merged"))
    words = ["-m", "finetune", "export", request["out"], "--to", "merged", "--out", merged]
    if cell.served and (error := process(words, folder, place, given)):
        return {"error": error}
    asked.write_text(
        json.dumps(
            {
                "base": request["model"],
                "trained": request["out"] if cell.stack else None,
                "rows": str((given.data / "test.jsonl").resolve()),
                "as_text": request["as_text"],
                "merged": str(merged) if cell.served else None,
                "four_bit": cell.mode == "qlora",
                "exact": 0 if request["as_text"] else given.exact,
            }
        )
    )
    if error := process(["-m", "benchmarks.quality.judge", asked, judged], folder, place, given):
        return {"error": error}
    for done in (request["out"], merged):
        shutil.rmtree(done, ignore_errors=True)
    return json.loads(judged.read_text())


def folder_of(cell: Cell, seed: int, given: argparse.Namespace) -> Path:
    return given.work / f"{cell.name.replace(' ', '-')}-{seed}"


def process(words: list[Any], folder: Path, place: Place, given: argparse.Namespace) -> list[str] | None:
    """Run `python *words` on the GPUs of a place. Returns the end of its log if it failed."""
    slot, gpus = place
    here = given.work / f"slot-{slot}"  # Unsloth writes its compiled trainers into the working folder
    here.mkdir(exist_ok=True)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "HF_HUB_OFFLINE": "1",
        **({} if gpus else {"OMP_NUM_THREADS": "1"}),  # of several, waiting ones would take the CPU from other jobs
    }
    log = folder / "log"
    with log.open("a") as output:
        code = run([sys.executable, *words], env=env, cwd=here, output=output, timeout=LIMIT)
    if code == 0:
        return None
    end = f"exit code {code}" if code else "too slow"
    return [*log.read_text(errors="replace").strip().splitlines()[-15:], end]


def settings(cell: Cell, seed: int, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """What a run is asked to do, for every stack."""
    model = MODELS[cell.model]
    packs, count = (1, SMOKE_ROWS) if given.smoke else (cells.PACKS, given.rows_of_step[cell.model])
    pack_length = cells.LONG_PACK if cell.long else cells.PACK_LENGTH
    packs = packs * cells.PACK_LENGTH // pack_length if cell.long and not given.smoke else packs
    batch = packs if cell.packed else count
    micro = model.micro.get(cell.stack or "trl", 1)
    if cell.packed and cell.stack != "ours":
        micro = 1  # attention over the whole micro-batch, masked: a larger one is slower
    return {
        "stack": cell.stack,
        "mode": cell.mode,
        "packed": cell.packed,
        "model": str((given.models / cell.model).resolve()),
        "backend": "transformers" if given.smoke or cell.long or cell.dtype == "float32" else "auto",
        "rows": str((given.data / "train.jsonl").resolve()),
        "held_out": str((given.data / "test.jsonl").resolve()),
        "as_text": model.as_text,
        "out": str(folder / "model"),
        "cache": str(given.work / "cache"),
        "seed": seed,
        "epochs": SMOKE_EPOCHS if given.smoke else model.epochs,
        "learning_rate": cell.rate or model.rates["full" if cell.mode == "full" else "lora"],
        "warmup_steps": 0 if given.smoke else 0.03,
        "max_length": SMOKE_PACK if given.smoke else cells.MAX_LENGTH,
        "pack_length": SMOKE_PACK if given.smoke else pack_length,
        "global_batch_size": batch,
        # Of packs this package chooses itself.
        "micro": None
        if cell.packed and cell.stack == "ours" and not given.micro and not given.smoke
        else cells.divisor(batch if cell.context else batch // cell.ranks, given.micro or micro),
    }


def rows_of_step(model: str, given: argparse.Namespace) -> int:
    """Rows of a padded step of a model."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(given.models / model)
    read, about = rows.read(given.data / "train.jsonl"), MODELS[model]
    tokens = sum(len(rows.encode(tokenizer, row, about.as_text)["input_ids"]) for row in read)
    return cells.rows_of_step(len(read), tokens, about.micro["trl"])


def command(cell: Cell, request: dict[str, Any], folder: Path, asked: Path, trained: Path) -> list[Any]:
    """The words after `python` that train."""
    if cell.stack != "ours":
        return ["-m", "benchmarks.quality.trl_peer", asked, trained]
    file = folder / "run.yaml"
    if request["as_text"]:  # this package reads the text from a column
        texts = [{"text": rows.text(row)} for row in rows.read(request["rows"])]
        request = request | {"rows": str(rows.write(folder / "text.jsonl", texts))}
    file.write_text(yaml.safe_dump(cells.configuration(cell, request), sort_keys=False))
    words = ["-m", "finetune.train", "--config", file]
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cell.ranks)]
    return words if cell.ranks == 1 else [*ranks, *words]


def ours(out: Path) -> dict[str, Any]:
    """What this package's record says of a run."""
    record = json.loads((out / "run.json").read_text())
    return {
        "train_seconds": record["training_seconds"],
        "steps": record["steps"],
        "tokens_per_step": record["tokens"] / record["steps"],
        "first_loss": record["losses"][0],
        "own_loss": record.get("eval_loss_after"),
        "adapter_part_kept": record.get("adapter_part_kept"),
        "peak_memory_gib": max(record["peak_memory_gib"], default=None),
        "backend": record["backend"],
        "master_weights": record["master_weights"],
        "micro": record["batch"]["per_device"],
        "micro_batch": record["micro_batch"],
        "start_up": record["start_up"],
        "sharding": record.get("sharding"),
        "dtype": record["dtype"],
        "attention": record["attention"],
        "layer_kernels": record["layer_kernels"],
    }


def smoke_passed(lines: list[dict[str, Any]]) -> bool:
    """Whether every run learned, and began with TRL's loss: the first step of all has the same rows."""
    found = {one["cell"]: one for one in lines if "error" not in one}
    base, peer = found.get("base"), found.get("trl lora padded")
    for name, one in found.items():
        if base and name != "base" and not one["loss"] < base["loss"]:
            say(f"{name}: held-out loss {one['loss']:.4f}, not below the pretrained model's {base['loss']:.4f}")
            return False
        if peer and name != "base" and not math.isclose(one["first_loss"], peer["first_loss"], rel_tol=0.01):
            say(f"{name}: loss of step 1 {one['first_loss']:.4f}, TRL's {peer['first_loss']:.4f}")
            return False
    return True


if __name__ == "__main__":
    raise SystemExit(main())
