"""Does a second GPU change the result? LoRA, QLoRA and full fine-tuning of a 1.2 B Llama shape on GSM8K, on 1 and 2.

    python -m benchmarks.one_and_two_gpus --train train.jsonl --eval test.jsonl --work WORK --out OUT

For each kind: 20 steps on 1 and on 2 GPUs, losses compared step by step; then the saved weights loaded by plain
transformers and peft, which must give the held-out loss that the run recorded, and must generate. For LoRA also, on 2
GPUs, the run again from step 10, and a dry run. Every run is the shipped command. Exits 1 where a figure is outside
its tolerance.
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
from benchmarks.processes import say, side_by_side

ROOT = Path(__file__).parent.parent
KINDS = {
    "lora": ["--lora.r", "16", "--training.learning_rate", "2e-4"],
    "qlora": ["--lora.r", "16", "--model.load_in_4bit", "true", "--training.learning_rate", "2e-4"],
    "full": ["--model.full_finetuning", "true", "--training.learning_rate", "2e-5"],
}
STEPS = 20
LOSS_TOLERANCE = 1e-3  # relative, per step: what bf16 sums in another order differ by
RELOAD_TOLERANCE = 1e-2  # relative: other kernels in bf16, one row at a time


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
        *("--data.eval_file", str(held_out), "--data.columns", "{instruction: question, output: answer}"),
        *("--data.max_length", "512", "--training.max_steps", str(STEPS), "--training.global_batch_size", "32"),
        *("--training.per_device_train_batch_size", "8", "--training.save_steps", "10", "--logging.logging_steps", "5"),
        *("--logging.generate_samples", "0"),
    ]
    results: dict = {"shape": options.shape, "steps": STEPS, "date": time.strftime("%Y-%m-%d"), "kinds": {}}
    options.out.mkdir(parents=True, exist_ok=True)

    # One-GPU runs side by side, each on a GPU of its own: this is about results, not about speed.
    alone = {
        kind: lambda gpu, kind=kind: train(1, common, kind, options.work / f"{kind}-1", gpu) for kind in options.kinds
    }
    if "lora" in options.kinds:
        dry = [*KINDS["lora"], "--training.output_dir", str(options.work / "dry"), "--dry-run"]
        alone["dry run"] = lambda gpu: launch(1, [*common, *dry], gpu)
    done = side_by_side(alone, (0, 1))
    if "dry run" in done:
        results["dry_run"] = {"exit": done["dry run"].returncode, "said": done["dry run"].stdout.splitlines()[-14:]}
    pairs = {kind: (done[kind], train(2, common, kind, options.work / f"{kind}-2")) for kind in options.kinds}
    reloaded = side_by_side(
        {kind: lambda gpu, kind=kind: reload_loss(options.work / f"{kind}-2", model, gpu) for kind in options.kinds},
        (0, 1),
    )
    for kind, (one, two) in pairs.items():
        results["kinds"][kind] = compare(kind, one, two, reloaded[kind])
        (options.out / "one_and_two_gpus.json").write_text(json.dumps(results, indent=1) + "\n")
    if "lora" in options.kinds:
        results["resumed"] = resume(common, options.work, pairs["lora"][1])
    results["versions"] = next(iter(pairs.values()))[1]["versions"]
    results["hardware"] = next(iter(pairs.values()))[1]["hardware"]
    verdicts = [one["passed"] for one in results["kinds"].values()]
    verdicts += [results["resumed"]["passed"], results["dry_run"]["exit"] == 0] if "lora" in options.kinds else []
    (options.out / "one_and_two_gpus.json").write_text(json.dumps(results, indent=1) + "\n")
    say("PASSED" if all(verdicts) else "FAILED")
    return 0 if all(verdicts) else 1


def compare(kind: str, run_one: dict, run_two: dict, reloaded: dict) -> dict:
    """The runs of one kind on 1 and on 2 GPUs, and the loss of the second one's reloaded weights."""
    one, two = run_one["losses"], run_two["losses"]
    worst = difference(one, two)
    same = difference([run_two["eval_loss_after"]], [reloaded["loss"]])
    falls = sum(two[-5:]) < sum(two[:5])
    passed = worst <= LOSS_TOLERANCE and falls and same <= RELOAD_TOLERANCE
    say(
        f"{kind:6} worst loss difference {worst:.2e} (1 vs 2 GPUs); loss {two[0]:.4f} -> {two[-1]:.4f}; held-out "
        f"{run_one['eval_loss_after']:.4f} / {run_two['eval_loss_after']:.4f}; reloaded {same:.1e}; peak "
        f"{max(run_one['peak_memory_gib']):.1f} / {max(run_two['peak_memory_gib']):.1f} GiB; "
        f"{'passed' if passed else 'FAILED'}"
    )
    return {
        "passed": passed,
        "worst_loss_difference_1_vs_2": worst,
        "reload_difference": same,
        "generated_after_reload": reloaded["generated"],
        "runs": {
            world: {key: value for key, value in run.items() if key not in ("config", "ledger", "versions", "hardware")}
            for world, run in (("1", run_one), ("2", run_two))
        },
    }


def resume(common: list[str], work: Path, whole: dict) -> dict:
    """LoRA on 2 GPUs again from the checkpoint of step 10."""
    again = work / "lora-again"
    shutil.rmtree(again, ignore_errors=True)
    shutil.copytree(work / "lora-2", again)
    shutil.rmtree(again / f"checkpoint-{STEPS}")
    run = train(2, [*common, "--training.resume_from_checkpoint", "true"], "lora", again)
    worst = difference(whole["losses"][STEPS // 2 :], run["losses"])
    say(f"resumed at step {STEPS // 2} on 2 GPUs: worst loss difference {worst:.2e}")
    return {"worst_loss_difference": worst, "losses": run["losses"], "passed": worst <= LOSS_TOLERANCE}


def difference(one: list[float], other: list[float]) -> float:
    """The largest relative difference; infinite where the two differ in number."""
    if len(one) != len(other):
        return float("inf")
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


def train(world: int, common: list[str], kind: str, folder: Path, gpu: int = 0) -> dict:
    """Run the shipped command; its run.json."""
    if "--training.resume_from_checkpoint" not in common:
        shutil.rmtree(folder, ignore_errors=True)
    done = launch(world, [*common, *KINDS[kind], "--training.output_dir", str(folder)], gpu)
    if done.returncode:
        say(done.stdout[-6000:] + done.stderr[-6000:])
        raise SystemExit(f"{kind} on {world} GPUs failed")
    return json.loads((folder / "run.json").read_text())


def launch(world: int, arguments: list[str], gpu: int = 0) -> subprocess.CompletedProcess:
    """`accelerate launch` with the shipped profile."""
    profile = ROOT / "accelerate_configs" / {1: "single.yaml", 2: "ddp_2.yaml"}[world]
    command = ["-m", "accelerate.commands.launch", "--config_file", str(profile), "-m", "finetune.train"]
    env = os.environ | ({"CUDA_VISIBLE_DEVICES": str(gpu)} if world == 1 else {})
    started = time.time()
    done = subprocess.run([sys.executable, *command, *arguments], capture_output=True, text=True, env=env)
    say(f"  {world} GPU, {time.time() - started:.0f} s, exit {done.returncode}: {' '.join(arguments[-4:])}")
    return done


def reload_loss(folder: Path, model: Path, gpu: int) -> dict:
    """Held-out loss of the saved weights under plain transformers, in another process, and a few generated words."""
    script = Path(__file__).parent / "reload.py"
    env = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
    command = [sys.executable, str(script), str(folder), str(model)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        say(done.stderr[-4000:])
        raise SystemExit("reloading failed")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    raise SystemExit(main())
