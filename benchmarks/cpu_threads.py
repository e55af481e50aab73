"""Measures the speed of training on a CPU by threads per process, idle and beside busy processes.

    python -m benchmarks.cpu_threads --out threads.json

Prints tokens/s per process and thread count: median over the runs. `finetune/runtime/cpu_threads.py` has the rule that
follows from the results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks import models
from finetune.runtime import launch_lines

ROOT = Path(__file__).parent.parent


def main() -> None:
    """Measure every combination once per run, in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="demo,llama-1m,llama-190m")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--ranks", default="1")
    parser.add_argument("--busy", default="0,2", help="numbers of busy processes beside the run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", default="40,20,4", help="optimizer steps, per model")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    names, steps = asked.models.split(","), [int(one) for one in asked.steps.split(",")]
    found: dict[tuple[str, int, int, int], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="threads-") as folder:
        prepared = {name: arguments(name, Path(folder)) for name in names}
        for run in range(asked.runs):
            for name, count in zip(names, steps, strict=True):
                for busy in map(int, asked.busy.split(",")):
                    for ranks in map(int, asked.ranks.split(",")):
                        for threads in map(int, asked.threads.split(",")):
                            with load(busy):
                                speed = train(prepared[name], count, ranks, threads, Path(folder))
                            found.setdefault((name, busy, ranks, threads), []).append(speed)
                            sys.stdout.write(
                                f"{run} {name} busy={busy} ranks={ranks} threads={threads}: {speed:,.0f}\n"
                            )
                            sys.stdout.flush()
    rows = [
        dict(zip(("model", "busy", "ranks", "threads"), key, strict=True), tokens_per_second=median(values), all=values)
        for key, values in found.items()
    ]
    for row in rows:
        sys.stdout.write(f"{row}\n")
    if asked.out:
        asked.out.write_text(json.dumps(rows, indent=1))


def arguments(name: str, folder: Path) -> list[str]:
    """Settings that train the model `name`; none for the embedded demo."""
    if name == "demo":
        return []
    rows = folder / "rows.jsonl"
    lines = [{"prompt": "one two three " * (5 + n % 20), "completion": "four five " * (5 + n % 30)} for n in range(256)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (folder / name).mkdir()
    home = models.build(folder / name, name, rows)
    return ["--model.model_name_or_path", str(home), "--data.train_file", str(rows)]


def train(settings: list[str], steps: int, ranks: int, threads: int, folder: Path) -> float:
    """Tokens per second and process of a run, without its first step."""
    out = Path(tempfile.mkdtemp(dir=folder))
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    own = ["--training.output_dir", str(out), "--training.max_steps", str(steps), "--logging.generate_samples", "0"]
    command = [*launch_lines.ranks(ranks), "-m", "finetune.train", *settings, *own, "--training.overwrite_output_dir"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    return json.loads((out / "run.json").read_text())["tokens_per_second_per_gpu"]


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Busy processes, for the time of the block."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
