"""What packing is worth: LoRA of a 1.2 B Llama shape on GSM8K's real lengths, on one GPU, as ratios of one session.

    python -m benchmarks.packing_speed --train train.jsonl --work WORK --out OUT

Padded rows in micro-batches of 64, packs of 16,384 tokens, the same packs without the patches, and full fine-tuning on
packs. Every run is the shipped command; rates leave the first, compiling step out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.models import build

ROOT = Path(__file__).parent.parent
PACKED = ["--data.packing", "true", "--data.pack_length", "16384", "--training.global_batch_size", "1"]
PADDED = ["--training.global_batch_size", "64", "--training.per_device_train_batch_size", "64"]
RUNS = {
    "padded, 64 rows": [*PADDED],
    "packed": [*PACKED],
    "packed, no patches": [*PACKED],
    "packed, full fine-tuning": [*PACKED, "--model.full_finetuning", "true", "--training.learning_rate", "2e-5"],
}
UNPATCHED = "import sys, patches; patches.EARLY = patches.LATE = (); from finetune.train import main; sys.exit(main())"


def main() -> int:
    """Run all, write one JSON file after each, print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", nargs="+", default=list(RUNS), choices=list(RUNS))
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    model = build(options.work / "model", "llama-1.2b", options.train)
    results: dict = {"date": time.strftime("%Y-%m-%d"), "steps": options.steps, "runs": {}}
    for name in options.only:
        out = options.work / name.replace(" ", "-").replace(",", "")
        arguments = [
            *("--model.model_name_or_path", str(model), "--data.train_file", str(options.train)),
            *("--data.columns", "{instruction: question, output: answer}", "--training.max_steps", str(options.steps)),
            *("--training.save_steps", "0", "--logging.logging_steps", "10", "--training.output_dir", str(out)),
            *("--training.gradient_checkpointing", "false", *RUNS[name]),
        ]
        start = ["-c", UNPATCHED] if "no patches" in name else ["-m", "finetune.train"]
        started = time.time()
        env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run([sys.executable, *start, *arguments], capture_output=True, text=True, env=env)
        if done.returncode:
            sys.stdout.write(done.stdout[-3000:] + done.stderr[-5000:])
            continue
        run = json.loads((out / "run.json").read_text())
        kept = ("losses", "tokens_per_second_per_gpu", "mfu", "step_seconds_median", "peak_memory_gib", "patches")
        results["runs"][name] = {key: run[key] for key in (*kept, "ledger", "seconds_to_first_step")}
        results |= {"versions": run["versions"], "hardware": run["hardware"]}
        (options.out / "packing_speed.json").write_text(json.dumps(results, indent=1) + "\n")
        sys.stdout.write(
            f"{name:26} {run['tokens_per_second_per_gpu']:9,.0f} tokens/s  MFU {run['mfu'] or 0:.1%}  peak "
            f"{run['peak_memory_gib'][0]:.1f} GiB  loss {run['losses'][0]:.4f} -> {run['losses'][-1]:.4f}  "
            f"step {run['step_seconds_median']:.3f} s  first step after {run['seconds_to_first_step']:.0f} s  "
            f"({time.time() - started:.0f} s)\n"
        )
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
