"""`finetune export --to merged` of a QLoRA against Unsloth's own merge: seconds, memory, the checks of both results.

    python -m benchmarks.merge_gpu --train train.jsonl --work DIR --out FILE.jsonl [--shape llama-8b] [--only STEPS]

Steps, in this order, each a process of its own that appends one JSON line to FILE: `train` (a few steps on frozen
weights in NF4), `export` (without its check), `unsloth` (`save_pretrained_merged` of the same folder), `check export`
and `check unsloth`, which is finetune/export/check.py on both: every tensor against PEFT's merge in float32, logits and
greedy answers against the base with the adapter unmerged.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import models, processes
from finetune.errors import RunError
from finetune.export import verify
from finetune.runtime import bootstrap

STEPS = ("train", "export", "unsloth", "check export", "check unsloth")
UNSLOTH = """
import sys
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained(sys.argv[1], max_seq_length=512, load_in_4bit=True)
model.save_pretrained_merged(sys.argv[2], tokenizer, save_method="merged_16bit")
"""


def main() -> int:
    """Run the steps. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--train", type=Path, required=True, help="JSON lines with question and answer, as GSM8K")
    parser.add_argument("--work", type=Path, required=True, help="scratch folder; 50 GB for 8 billion parameters")
    parser.add_argument("--out", type=Path, required=True, help="file to append the JSON lines to")
    parser.add_argument("--shape", default="llama-8b", choices=models.SHAPES)
    parser.add_argument("--only", default=",".join(STEPS), help="steps, separated by commas")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    base = models.build(given.work / given.shape, given.shape, given.train)
    for name in given.only.split(","):
        line = json.dumps(
            {"step": name, "shape": given.shape, "versions": bootstrap.versions()} | step(name, given, base)
        )
        with given.out.open("a") as out:
            out.write(line + "\n")
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    return 0


def step(name: str, given: argparse.Namespace, base: Path) -> dict[str, Any]:
    """One step's figures."""
    run = given.work / "run"
    merged = {"export": given.work / "export", "unsloth": given.work / "unsloth"}
    if name.startswith("check "):
        from transformers import AutoTokenizer

        prompts = verify.prompts(AutoTokenizer.from_pretrained(run))
        job = {"base": base, "adapter": run, "exported": merged[name.split()[1]], "tokenizer": run, "prompts": prompts}
        try:
            found = verify.run(job | {"new_template": True})
        except RunError as error:
            return {"passed": False, "why": str(error)}
        found["tensors"]["wrong"] = [len(found["tensors"]["wrong"]), *found["tensors"]["wrong"][:3]]
        return found
    python = [sys.executable]
    command = {
        "train": [
            *(*python, "-m", "finetune.train", "--model.model_name_or_path", base, "--model.load_in_4bit", "true"),
            *("--data.train_file", given.train, "--data.columns", "{instruction: question, output: answer}"),
            *("--data.max_length", "512", "--training.max_steps", "12", "--training.global_batch_size", "8"),
            *("--training.learning_rate", "1e-3", "--training.lr_scheduler_type", "constant"),
            *("--training.output_dir", run, "--training.overwrite_output_dir", "true", "--training.save_steps", "0"),
            *("--logging.generate_samples", "0"),
        ],
        "export": [
            *(*python, "-m", "finetune.cli", "export", run, "--to", "merged", "--out", merged["export"]),
            *("--no-verify", "--base", base),
        ],
        "unsloth": [*python, "-c", UNSLOTH, run, merged["unsloth"]],
    }[name]
    return measured([str(word) for word in command], given.work / f"{name}.log")


def measured(command: list[str], log: Path) -> dict[str, Any]:
    """Run a command; its seconds, and the largest memory of it and of all that it starts, looked at 20 times a second.

    Host memory is what the processes own (anonymous pages: pages of mapped files go when others need the room). GPU
    memory is all that is in use on the device, less what was before.
    """
    peaks = {"host": 0.0, "gpu": 0.0}
    done = threading.Event()
    before = _gpu_bytes()
    began = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, text=True)
        processes.RUNNING.append(process)

        def watch() -> None:
            while not done.wait(0.05):
                peaks["host"] = max(peaks["host"], _anonymous_bytes(process.pid))
                peaks["gpu"] = max(peaks["gpu"], _gpu_bytes() - before)

        watcher = threading.Thread(target=watch)
        watcher.start()
        code = process.wait()
        done.set()
        watcher.join()
    found: dict[str, Any] = {"exit_code": code, "seconds": time.perf_counter() - began}
    found |= {f"peak_{name}_gib": value / 2**30 for name, value in peaks.items()}
    return found if code == 0 else found | {"log": log.read_text(errors="replace")[-3000:]}


def _anonymous_bytes(pid: int) -> int:
    import psutil

    total = 0
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return 0
    for one in family:
        try:
            status = Path(f"/proc/{one.pid}/status").read_text()
        except OSError:  # it has ended
            continue
        total += sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:"))
    return total


def _gpu_bytes() -> int:
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)
    except Exception:  # no library, no driver
        return 0


if __name__ == "__main__":
    processes.end_with_this_one()
    raise SystemExit(main())
