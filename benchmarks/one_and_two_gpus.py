"""Does a second GPU change the result? LoRA, QLoRA and full fine-tuning of a 1.2 B Llama shape on GSM8K, on 1 and 2.

    python -m benchmarks.one_and_two_gpus --train gsm8k/train.jsonl --eval gsm8k/test.jsonl --work /tmp/work --out out

For each kind: 20 steps on 1 and on 2 GPUs, losses compared step by step; then, on 2 GPUs, the run again from step 10;
then the saved weights loaded by plain transformers and peft, which must give the held-out loss that the run recorded.
Last, a dry run. Every run is the shipped command. Exits 1 where a figure is outside its tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.models import build

KINDS = {
    "lora": ["--lora.r", "16", "--training.learning_rate", "2e-4"],
    "qlora": ["--lora.r", "16", "--model.load_in_4bit", "true", "--training.learning_rate", "2e-4"],
    "full": ["--model.full_finetuning", "true", "--training.learning_rate", "2e-5"],
}
STEPS = 20
LOSS_TOLERANCE = 1e-3  # relative, per step: what bf16 sums in another order differ by


def main() -> int:
    """Run all, write one JSON file, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--eval", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--shape", default="llama-1.2b")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    model = build(options.work / "model", options.shape, options.train)
    held_out = options.work / "held_out.jsonl"
    held_out.write_text("".join(options.eval.open(encoding="utf-8").readlines()[:128]), encoding="utf-8")
    common = [
        *("--model.model_name_or_path", str(model), "--data.train_file", str(options.train)),
        *("--data.eval_file", str(held_out), "--data.columns", "{prompt: question, completion: answer}"),
        *("--data.max_length", "512", "--training.max_steps", str(STEPS), "--training.global_batch_size", "32"),
        *("--training.per_device_train_batch_size", "8", "--training.save_steps", "10", "--logging.logging_steps", "5"),
    ]
    results: dict = {"shape": options.shape, "steps": STEPS, "date": time.strftime("%Y-%m-%d"), "kinds": {}}
    for kind in options.kinds:
        results["kinds"][kind] = compare(kind, common + KINDS[kind], options.work, model)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "one_and_two_gpus.json").write_text(json.dumps(results, indent=1) + "\n")
    dry = launch(1, [*common, *KINDS["lora"], "--training.output_dir", str(options.work / "dry"), "--dry-run"])
    results["dry_run"] = {"exit": dry.returncode, "said": dry.stdout.splitlines()[-12:]}
    (options.out / "one_and_two_gpus.json").write_text(json.dumps(results, indent=1) + "\n")
    good = all(one["passed"] for one in results["kinds"].values()) and dry.returncode == 0
    say(f"dry run: exit {dry.returncode}")
    say("PASSED" if good else "FAILED")
    return 0 if good else 1


def compare(kind: str, arguments: list[str], work: Path, model: Path) -> dict:
    """One kind of fine-tuning on 1 GPU, on 2, and resumed on 2."""
    runs = {}
    for world in (1, 2):
        folder = work / f"{kind}-{world}"
        shutil.rmtree(folder, ignore_errors=True)
        runs[world] = train(world, [*arguments, "--training.output_dir", str(folder)], folder)
    whole = work / f"{kind}-2"
    again = work / f"{kind}-again"
    shutil.rmtree(again, ignore_errors=True)
    shutil.copytree(whole, again, ignore=shutil.ignore_patterns("checkpoint-20", "*.safetensors", "run.json"))
    resume = ["--training.resume_from_checkpoint", "true", "--training.output_dir", str(again)]
    resumed = train(2, [*arguments, *resume], again)

    one, two = runs[1]["losses"], runs[2]["losses"]
    worst = max(abs(a - b) / abs(a) for a, b in zip(one, two, strict=True))
    late = max(abs(a - b) / abs(a) for a, b in zip(two[10:], resumed["losses"], strict=True))
    reloaded = reload_loss(whole, model, runs[2])
    result = {
        "worst_loss_difference_1_vs_2": worst,
        "worst_loss_difference_resumed": late,
        "eval_loss": {"1": runs[1]["eval_loss_after"], "2": runs[2]["eval_loss_after"], "reloaded": reloaded["loss"]},
        "generated_after_reload": reloaded["generated"],
        "losses": {"1": one, "2": two, "resumed": resumed["losses"]},
        "runs": {
            str(world): {key: value for key, value in run.items() if key not in ("config", "ledger")}
            for world, run in runs.items()
        },
    }
    falls = sum(two[-5:]) < sum(two[:5])
    same = abs(reloaded["loss"] - runs[2]["eval_loss_after"]) / runs[2]["eval_loss_after"]
    result["reload_difference"] = same
    result["passed"] = worst <= LOSS_TOLERANCE and late <= LOSS_TOLERANCE and falls and same <= 1e-2
    speed = {world: run["tokens_per_second_per_gpu"] for world, run in runs.items()}
    memory = {world: max(run["peak_memory_gib"]) for world, run in runs.items()}
    say(
        f"{kind:6} worst loss difference {worst:.2e} (1 vs 2 GPUs), {late:.2e} (resumed); loss {two[0]:.4f} -> "
        f"{two[-1]:.4f}; "
        f"reloaded {same:.1e}; tokens/s per GPU {speed[1]:,.0f} / {speed[2]:,.0f}; peak {memory[1]:.1f} / "
        f"{memory[2]:.1f} GiB; "
        f"{'passed' if result['passed'] else 'FAILED'}"
    )
    return result


def train(world: int, arguments: list[str], folder: Path) -> dict:
    """Run the shipped command; its run.json."""
    done = launch(world, arguments)
    if done.returncode:
        say(done.stdout[-6000:] + done.stderr[-6000:])
        raise SystemExit(f"training on {world} GPUs failed")
    return json.loads((folder / "run.json").read_text())


def launch(world: int, arguments: list[str]) -> subprocess.CompletedProcess:
    """`accelerate launch` with the shipped profile."""
    profile = {1: "single.yaml", 2: "ddp_2.yaml"}[world]
    root = Path(__file__).parent.parent
    command = ["-m", "accelerate.commands.launch", "--config_file", str(root / "accelerate_configs" / profile)]
    started = time.time()
    done = subprocess.run(
        [sys.executable, *command, "-m", "finetune.train", *arguments], capture_output=True, text=True, env=os.environ
    )
    say(f"  {world} GPU, {time.time() - started:.0f} s, exit {done.returncode}: {' '.join(arguments[-4:])}")
    return done


def reload_loss(folder: Path, model: Path, run: dict) -> dict:
    """Held-out loss of the saved weights under plain transformers, in another process, and a few generated words."""
    script = Path(__file__).parent / "reload.py"
    done = subprocess.run([sys.executable, str(script), str(folder), str(model)], capture_output=True, text=True)
    if done.returncode:
        say(done.stderr[-4000:])
        raise SystemExit("reloading failed")
    return json.loads(done.stdout.splitlines()[-1])


def say(text: str) -> None:
    """Plain lines, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
