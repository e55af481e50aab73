"""Does a second GPU change what a converted notebook trains? Scripts as `finetune convert` wrote them, on 1 and 2 GPUs.

    python -m benchmarks.notebooks_on_gpus FOLDER --corpus train.jsonl --work WORK --out OUT

FOLDER/runs.yaml lists them: name, script (its YAML beside it), data (a folder whose content is copied into the working
folder, where the script's own `load_dataset("owner/name")` finds it), overrides (`section.key: value`), and
overrides_cpu for what a CPU cannot do. All get a local model of random weights in place of the one that they name,
`--shape` of `benchmarks.models`; nothing is downloaded. The script is not changed, and its own output_dir is used. A
script in the drop-in form has no settings outside of itself: its `texts` (old: new) are replaced, in which {model},
{steps} and {accumulation} stand for the model, the steps, and `accumulation` divided by the number of ranks.

For each: 8 steps on 1 and on 2 ranks at the global batch of the notebook; the loss of every step is compared, and the
two must leave one folder with a model or an adapter, of the same files. Several runs share a GPU: this is about
results, not about speed. Without a GPU the ranks are processes on the CPU, one run after the other. One that fails or
takes too long is recorded, the others go on. Exits 1 where a run failed or a loss differs by more than the tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks import processes
from benchmarks.models import build
from benchmarks.one_and_two_gpus import LOSS_TOLERANCE, difference
from benchmarks.processes import say, side_by_side

ROOT = Path(__file__).parent.parent
PROFILES = {True: {1: "single.yaml", 2: "ddp_2.yaml"}, False: {1: "single.yaml", 2: "cpu_2.yaml"}}
STEPS = 8
WEIGHTS = ("adapter_model.safetensors", "model.safetensors", "model.safetensors.index.json")
WRITING = threading.Lock()
KEPT = ("status", "world_size", "batch", "backend", "dtype", "data_fingerprint", "tokens", "steps", "losses", "error")


def main() -> int:
    """Run all, write one JSON file, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--corpus", type=Path, required=True, help="JSON lines that the model's tokenizer is made of")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="llama-1.2b")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one run")
    parser.add_argument("--side-by-side", type=int, default=3, help="notebooks at a time, on the GPUs that there are")
    options = parser.parse_args()
    runs = yaml.safe_load((options.folder / "runs.yaml").read_text(encoding="utf-8"))
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    processes.end_with_this_one()
    gpus = visible_gpus()
    if len(gpus) == 1:
        parser.error("1 GPU is visible; 2 are needed, or none for ranks on the CPU (CUDA_VISIBLE_DEVICES=)")
    model = build(options.work / "model", options.shape, options.corpus).resolve()

    pairs = [",".join(pair) for pair in zip(gpus[::2], gpus[1::2], strict=False)] or [""]
    count = options.side_by_side if gpus else 1
    slots = [((gpus or [""])[n % max(len(gpus), 1)], pairs[n % len(pairs)]) for n in range(count)]
    results: dict[str, Any] = {
        "shape": options.shape,
        "steps": STEPS,
        "tolerance": LOSS_TOLERANCE,
        "date": time.strftime("%Y-%m-%d"),
        "device": "gpu" if gpus else "cpu",
        "notebooks": {},
    }

    def both(number: int, run: dict, slot: tuple[str, str]) -> None:
        one, two = (train(run, world, where, 29500 + number, model, options) for world, where in enumerate(slot, 1))
        with WRITING:
            results["notebooks"][run["name"]] = compare(run, one, two)
            results.update({key: two["record"][key] for key in ("versions", "hardware") if key in two["record"]})
            results["passed"] = all(one["passed"] for one in results["notebooks"].values())
            (options.out / "notebooks.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    side_by_side({n: lambda slot, n=n, run=run: both(n, run, slot) for n, run in enumerate(runs)}, slots)
    table(results["notebooks"])
    say("PASSED" if results["passed"] else "FAILED")
    return 0 if results["passed"] else 1


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return named.split(",")[:count] if named is not None else [str(number) for number in range(count)]


def train(run: dict, world: int, where: str, port: int, model: Path, options: argparse.Namespace) -> dict:
    """The script on `world` ranks, in a working folder of its own: how it ended, its run.json, what it left behind."""
    folder = (options.work / f"{run['name']}-{world}").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(options.folder / run["data"], folder)
    inputs = set(folder.iterdir())
    overrides = {
        "model.model_name_or_path": str(model),
        "training.max_steps": STEPS,
        "logging.generate_samples": 0,
        **run.get("overrides", {}),
        **({} if where else run.get("overrides_cpu", {})),
    }
    profile = ROOT / "accelerate_configs" / PROFILES[bool(where)][world]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(profile)]
    script = (options.folder / run["script"]).resolve()
    if "texts" in run:
        overrides = {}
        script = with_texts(script, run, world, model, folder / script.name)
    command += ["--main_process_port", str(port), str(script)]
    for key, value in overrides.items():
        command += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    started = time.time()
    code = launch(command, folder, environment(folder, where), options.timeout)
    seconds = time.time() - started
    say(f"  {run['name']:16} {world} rank{'s' * (world > 1)} {where:4} {seconds:4.0f} s, exit {code}")
    outputs = model_folders(path for path in folder.iterdir() if path.is_dir() and path not in inputs)
    record = next(folder.rglob("run.json"), None)
    return {
        "exit": code,
        "seconds": round(seconds, 1),
        "overrides": overrides,
        "outputs": outputs,
        "adapter": folder / outputs[0]["folder"] / WEIGHTS[0] if outputs else None,
        "record": json.loads(record.read_text(encoding="utf-8")) if record else {},
        "said": "" if code == 0 else (folder / "log").read_text(encoding="utf-8", errors="replace")[-4000:],
    }


def with_texts(script: Path, run: dict, world: int, model: Path, out: Path) -> Path:
    """A copy of a drop-in script with its `texts` replaced; each must be there once."""
    values = {"model": model, "steps": STEPS, "accumulation": run.get("accumulation", 0) // world}
    text = script.read_text(encoding="utf-8")
    for old, new in run["texts"].items():
        if text.count(old) != 1:
            raise ValueError(f"{script.name} must have the text `{old}` once")
        text = text.replace(old, new.format(**values))
    out.write_text(text, encoding="utf-8")
    return out


def environment(folder: Path, where: str) -> dict[str, str]:
    """No network, caches in the run's own folder (so the second run prepares its rows too), compiled kernels shared."""
    return (
        os.environ
        | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
        | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / ".hf"), "FINETUNE_CACHE": str(folder / ".cache")}
        | {"TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "4")}
        | ({"CUDA_VISIBLE_DEVICES": where} if where else {})
    )


def launch(command: Sequence[str], folder: Path, env: dict[str, str], timeout: float) -> int | str:
    """Run it in `folder`, its output in the file `log` there. The exit code, or that it took too long."""
    with (folder / "log").open("w", encoding="utf-8") as log:
        code = processes.run(command, cwd=folder, env=env, output=log, timeout=timeout)
    return f"no end after {timeout:.0f} s" if code is None else code


def model_folders(made: Any) -> list[dict]:
    """Every folder in those that a run made which holds a model or an adapter, checkpoints aside, and its files."""
    found = []
    for top in sorted(path for path in made if not path.name.startswith(".")):
        for folder in (top, *sorted(path for path in top.rglob("*") if path.is_dir())):
            names = sorted(path.name for path in folder.iterdir() if path.is_file())
            if set(names) & set(WEIGHTS) and not folder.name.startswith("checkpoint-"):
                found.append({"folder": str(folder.relative_to(top.parent)), "files": names})
    return found


def compare(run: dict, one: dict, two: dict) -> dict:
    """The runs of one notebook on 1 and on 2 ranks."""
    losses = [side["record"].get("losses") or [] for side in (one, two)]
    worst = difference(*losses) if len(losses[0]) == STEPS else None
    same_files = one["outputs"] == two["outputs"] and len(one["outputs"]) == 1
    ended = one["exit"] == 0 and two["exit"] == 0
    ranks = [side["record"].get("world_size") for side in (one, two)]
    return {
        "passed": ended and worst is not None and worst <= LOSS_TOLERANCE and same_files and ranks == [1, 2],
        "script": run["script"],
        "about": run.get("about"),
        "worst_loss_difference_1_vs_2": worst,
        "learnt_weights_difference_1_vs_2": learnt_difference(one["adapter"], two["adapter"]),
        "one_model_folder_of_the_same_files": same_files,
        "ranks": ranks,
        "runs": {
            world: {key: value for key, value in side.items() if key not in ("record", "adapter")}
            | {key: side["record"][key] for key in KEPT if key in side["record"]}
            for world, side in (("1", one), ("2", two))
        },
    }


def learnt_difference(one: Path | None, two: Path | None) -> float | None:
    """How far apart two adapters are: the norm of the difference of all B matrices over the norm of the first ones'.

    B starts at zero, so all that it holds was supervised. Ranks that each learn from their own rows alone would be far
    apart here after a few steps, where the loss of a model of random weights has hardly moved. For a figure, not for a
    verdict: Adam turns what bf16 rounds differently in small gradients into whole steps. None without two adapters.
    """
    from safetensors.torch import load_file

    if not (one and two and one.is_file() and two.is_file()):
        return None
    a, b = load_file(one), load_file(two)
    supervised = [name for name in a if "lora_B" in name]
    apart = sum(float((a[name].double() - b[name].double()).square().sum()) for name in supervised)
    whole = sum(float(a[name].double().square().sum()) for name in supervised)
    return (apart / whole) ** 0.5 if whole else None


def table(notebooks: dict[str, dict]) -> None:
    """One line for each notebook; what a failed run said last."""
    say(f"{'notebook':16} {'worst loss diff.':>16} {'adapter diff.':>14} {'loss':>19}  folder")
    for name, result in notebooks.items():
        worst, sides = result["worst_loss_difference_1_vs_2"], result["runs"].values()
        losses = result["runs"]["2"].get("losses") or [float("nan")]
        folders = sorted({output["folder"] for side in sides for output in side["outputs"]})
        shown = ["-" if x is None else f"{x:.1e}" for x in (worst, result["learnt_weights_difference_1_vs_2"])]
        verdict = "" if result["passed"] else "  FAILED"
        moved = f"{losses[0]:8.4f} -> {losses[-1]:8.4f}"
        say(f"{name:16} {shown[0]:>16} {shown[1]:>14} {moved:>19}  {', '.join(folders) or '-'}{verdict}")
        for side in sides:
            if side["exit"] != 0:
                say(f"--- exit {side['exit']}:\n{side['said'][-1500:]}\n---")


if __name__ == "__main__":
    raise SystemExit(main())
