"""Kill a run on two GPUs: while a rank is blocked in NCCL, its launcher, one of its ranks. One JSON line per trial.

    python -m benchmarks.gpu_faults --train train.jsonl --work DIR --out gpu-faults.jsonl

Each trial starts `torchrun --nproc_per_node 2 -m finetune.train` (LoRA of a Llama shape of 190 M parameters with random
weights), waits for a step, strikes, and reports how long it took until every process was gone and which checkpoint was
there. The run is then resumed on one GPU for a few steps. Needs Linux and two GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from benchmarks import models
from benchmarks.faults import MARK, Tree, checkpoints, errors_in, read_json, send

STEPS, SAVE = 400, 20
STRIKE_AT = 27  # step: the newest checkpoint by save_steps is 20
PATIENCE = 100  # seconds after the signal; the promise is 60
BLOCKED_SECONDS = 3.0  # after its peer was stopped a rank is inside a collective for certain: a step takes 0.1 s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--train", type=Path, required=True, help="JSON lines with question and answer, as GSM8K")
    parser.add_argument("--work", type=Path, required=True, help="scratch folder")
    parser.add_argument("--out", type=Path, required=True, help="file to append the JSON lines to")
    parser.add_argument("--only", default="", help="run the trials whose name contains this")
    parser.add_argument("--shape", default="llama-190m", choices=sorted(models.SHAPES))
    parser.add_argument("--shard", action="store_true", help="shard the model, with transformers; resumed unsharded")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    model = models.build(given.work / "model", given.shape, given.train)
    with given.out.open("a") as out:
        for name, (backend, blow, expect_checkpoint) in TRIALS.items():
            if given.only in name:
                result = trial(name, "transformers" if given.shard else backend, blow, expect_checkpoint, model, given)
                out.write(json.dumps(result) + "\n")
                out.flush()
                sys.stdout.write(json.dumps(result) + "\n")
                sys.stdout.flush()


def trial(
    name: str, backend: str, blow: Callable[[Tree], None], expected: bool, model: Path, given: argparse.Namespace
) -> dict:
    """Start on two GPUs, strike, wait for the end, resume on one GPU."""
    folder = given.work / name.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    out, log = folder / "out", folder / "killed.log"
    arguments = [
        *("--model.model_name_or_path", str(model), "--model.backend", backend),
        *("--data.train_file", str(given.train), "--data.columns", "{instruction: question, output: answer}"),
        *("--data.max_length", "512", "--logging.generate_samples", "0", "--logging.logging_steps", "1"),
        *("--training.max_steps", str(STEPS), "--training.save_steps", str(SAVE), "--training.global_batch_size", "16"),
        *("--training.output_dir", str(out)),
    ]
    sharded = ["--training.strategy", "shard"] if given.shard else []
    tree = start(2, [*arguments, *sharded], log)
    began = time.monotonic()
    while last_step(log) < STRIKE_AT and tree.process.poll() is None and time.monotonic() - began < 240:
        time.sleep(0.005)
    reached = last_step(log)
    blow(tree)
    at = time.monotonic()
    left = tree.wait(PATIENCE)
    gone = round(time.monotonic() - at, 1)
    tree.end()
    found = checkpoints(out)
    newest = max((step for step, good in found.items() if good), default=0)
    result = {"trial": name, "backend": backend, "sharded": given.shard, "step_at_strike": reached, "all_gone_s": gone}
    result |= {"left": sorted(left.values()), "checkpoints": list(found), "newest_whole": newest}
    result |= {
        "incomplete": [step for step, good in found.items() if not good],
        "printed": errors_in(tree.tail(20_000)),
    }

    resumed_log = folder / "resumed.log"
    again = ["--training.resume_from_checkpoint", "true", "--training.max_steps", str(newest + 3)]
    schedule = ["--training.resume_with_changes", "true"]  # a shorter run under a decaying schedule
    code = start(1, [*arguments, *again, *schedule], resumed_log).process.wait(240)
    record = read_json(out / "run.json")
    result |= {"resume_code": code, "resume_status": record.get("status"), "resume_steps": record.get("steps")}
    promised = reached if expected else reached - SAVE
    result["kept_promise"] = not left and gone <= 60 and newest >= promised and code == 0
    return result


def start(world: int, arguments: list[str], log: Path) -> Tree:
    """torchrun with `world` ranks, in a session of its own."""
    mark = uuid.uuid4().hex
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world))
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, *launcher, "-m", "finetune.train", *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {MARK: mark, "COLUMNS": "200"},
            start_new_session=True,
        )
    return Tree(process, mark, log)


def last_step(log: Path) -> int:
    """The last step that the run printed."""
    steps = re.findall(rf"step (\d+)/{STEPS}", log.read_text(errors="replace"))
    return int(steps[-1]) if steps else 0


def rank(tree: Tree, number: int) -> int:
    """The process of a rank."""
    return next(pid for pid, name in tree.members().items() if name == f"rank {number}")


def blocked_for_a_while(tree: Tree) -> None:
    """SIGTERM to rank 0 while it waits in a collective for rank 1, which comes back."""
    send(rank(tree, 1), signal.SIGSTOP)
    time.sleep(BLOCKED_SECONDS)
    send(rank(tree, 0), signal.SIGTERM)
    time.sleep(BLOCKED_SECONDS)
    send(rank(tree, 1), signal.SIGCONT)


def blocked_for_good(tree: Tree) -> None:
    """SIGTERM to rank 0 while it waits in a collective for rank 1, which never comes back."""
    send(rank(tree, 1), signal.SIGSTOP)
    time.sleep(BLOCKED_SECONDS)
    send(rank(tree, 0), signal.SIGTERM)


def launcher_killed(tree: Tree) -> None:
    """SIGKILL to torchrun alone."""
    send(tree.process.pid, signal.SIGKILL)


def rank_killed(tree: Tree) -> None:
    """SIGKILL to rank 1."""
    send(rank(tree, 1), signal.SIGKILL)


# Name: backend, strike, whether a checkpoint of the step at the strike is promised (else one of the last save_steps).
TRIALS: dict[str, tuple[str, Callable[[Tree], None], bool]] = {
    "SIGTERM to a blocked rank whose peer returns": ("unsloth", blocked_for_a_while, True),
    "SIGKILL to the launcher": ("unsloth", launcher_killed, True),
    "SIGKILL to one rank": ("transformers", rank_killed, False),
    "SIGTERM to a blocked rank whose peer is stuck": ("transformers", blocked_for_good, False),
}

if __name__ == "__main__":
    main()
