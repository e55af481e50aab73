"""Stop or block one rank of a run on two GPUs, and check that the run names it. One JSON line per trial.

    python -m benchmarks.gpu_hang --train train.jsonl --work DIR --out gpu-hang.jsonl

Each trial starts `torchrun --nproc_per_node 2 tests/spies/hang.py` (LoRA of a Llama shape of 190 M parameters with
random weights) with training.ddp_timeout 30; one rank gets stuck after STEP steps. Reported: how long the run took from
there until every process was gone, what the survivor printed, what hang/report.json says, and the files beside it.
`kept_promise`: the report names the rank, the step and the phase, one sentence says so without a traceback, and nothing
is left half a minute after the timeout; a slow save is reported and the run ends well. Needs Linux and two GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

from benchmarks import models
from benchmarks.faults import MARK, Tree, checkpoints, read_json

STEP, STEPS, TIMEOUT = 15, 40, 30
PATIENCE = TIMEOUT + 30  # seconds from the fault until all processes have ended
START_SECONDS = 300
ROOT = Path(__file__).parent.parent

# Name: kind of fault (see tests/spies/hang.py), the stuck rank, the phase that it should be reported in.
TRIALS = {
    "rank 1 stopped": ("stop", 1, "data"),
    "rank 0 stopped": ("stop", 0, "data"),
    "rank 1 waits for its rows": ("loader", 1, "data"),
    "rank 0 saves slowly": ("save", 0, "saving"),
}


def main() -> int:
    """Run the trials. Returns 0 if all kept the promise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--train", type=Path, required=True, help="JSON lines with question and answer, as GSM8K")
    parser.add_argument("--work", type=Path, required=True, help="scratch folder")
    parser.add_argument("--out", type=Path, required=True, help="file to append the JSON lines to")
    parser.add_argument("--only", default="", help="run the trials whose name contains this")
    parser.add_argument("--backend", default="transformers", choices=("transformers", "unsloth"))
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    model = models.build(given.work / "model", "llama-190m", given.train)
    kept = []
    with given.out.open("a") as out:
        for name in TRIALS:
            if given.only in name:
                result = trial(name, model, given)
                kept.append(result["kept_promise"])
                out.write(json.dumps(result) + "\n")
                out.flush()
                sys.stdout.write(json.dumps(result, indent=1) + "\n")
                sys.stdout.flush()
    return 0 if all(kept) else 1


def trial(name: str, model: Path, given: argparse.Namespace) -> dict:
    """Start on two GPUs, wait for the fault and for the end."""
    kind, rank, phase = TRIALS[name]
    folder = given.work / name.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "out"
    tree = start(arguments(model, given, out), folder / "log", kind, rank)
    began = time.monotonic()
    while last_step(tree.log) < STEP and tree.process.poll() is None and time.monotonic() - began < START_SECONDS:
        time.sleep(0.005)
    stuck = time.monotonic()
    first_word = None
    while tree.process.poll() is None and time.monotonic() - stuck < PATIENCE:
        if first_word is None and words(tree.log):
            first_word = round(time.monotonic() - stuck, 1)
        time.sleep(0.05)
    left = tree.wait(max(stuck + PATIENCE - time.monotonic(), 0.1))
    gone = round(time.monotonic() - stuck, 1)
    code = tree.process.poll()
    tree.end()
    report, record = read_json(out / "hang" / "report.json"), read_json(out / "run.json")
    missing = [(one["rank"], one["phase"]) for one in report.get("missing", ())]
    result = {"trial": name, "backend": given.backend, "ddp_timeout": TIMEOUT, "first_word_s": first_word}
    result |= {"all_gone_s": gone, "left": sorted(left.values()), "code": code, "printed": words(tree.log)}
    result |= {"report": report, "status": record.get("status"), "error": record.get("error")}
    result |= {"files": {path.name: path.stat().st_size for path in sorted((out / "hang").glob("*"))}}
    result["checkpoints"] = list(checkpoints(out))
    result["torch_blames"] = blamed(tree.log)
    good = not left and missing == [(rank, phase)]
    if kind == "save":
        good = good and code == 0 and record.get("status") == "done"
    else:
        (step,) = {one["step"] for one in report.get("missing", ())} or {None}
        good = good and step == STEP + 1 and code != 0 and record.get("status") == "failed"
        good = good and len(words(tree.log)) == 1 and "Traceback" not in own_text(tree.log)
    result["kept_promise"] = good
    return result


def arguments(model: Path, given: argparse.Namespace, out: Path) -> list[str]:
    """Of the training run."""
    return [
        *("--model.model_name_or_path", str(model), "--model.backend", given.backend),
        *("--data.train_file", str(given.train), "--data.columns", "{instruction: question, output: answer}"),
        *("--data.max_length", "512", "--logging.generate_samples", "0", "--logging.logging_steps", "1"),
        *("--training.max_steps", str(STEPS), "--training.save_steps", str(STEP)),
        *("--training.global_batch_size", "16", "--training.ddp_timeout", str(TIMEOUT)),
        *("--training.output_dir", str(out), "--training.overwrite_output_dir", "true"),
    ]


def start(arguments: list[str], log: Path, kind: str, rank: int) -> Tree:
    """torchrun with two ranks, in a session of its own."""
    mark = uuid.uuid4().hex
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    fault = {"STUCK": kind, "STUCK_RANK": str(rank), "STUCK_STEP": str(STEP)}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *launcher, str(ROOT / "tests" / "spies" / "hang.py"), *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | fault | {MARK: mark, "COLUMNS": "200", "PYTHONPATH": path},
            start_new_session=True,
        )
    return Tree(process, mark, log)


def last_step(log: Path) -> int:
    """The last step that the run printed."""
    steps = re.findall(rf"step (\d+)/{STEPS}", log.read_text(errors="replace"))
    return int(steps[-1]) if steps else 0


def words(log: Path) -> list[str]:
    """What the run itself said about the fault."""
    return re.findall(r"^(?:error|warning: rank).*$", log.read_text(errors="replace"), re.M)


def own_text(log: Path) -> str:
    """What was printed before torch's launcher reports the end of a rank."""
    return log.read_text(errors="replace").partition("torch/distributed/elastic")[0]


def blamed(log: Path) -> str | None:
    """The rank that torch's launcher calls the root cause."""
    found = re.search(r"Root Cause.*?rank\s*: (\d+)", log.read_text(errors="replace"), re.S)
    return found.group(1) if found else None


if __name__ == "__main__":
    raise SystemExit(main())
