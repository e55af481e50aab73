"""Is a run the same on any number of ranks? `finetune parity` over backends, adapters, packing, accumulation and more.

    python -m benchmarks.parity_matrix --train train.jsonl --eval test.jsonl --work WORK --out OUT.jsonl

One line per case, written as it is done: the case, the versions and the hardware, and what `finetune parity --json`
reported. On CPU ranks it compares 1, 2 and 4 in float32 on a model of 1 M parameters, on GPUs what `--world-sizes` and
`--shape` say, in bfloat16. Exits 1 where a case is not proven. DDP and sharded, all kinds:

    python -m benchmarks.parity_matrix ... --strategies ddp,shard --backends transformers --cases accumulation

Mixtures of experts, with a load-balancing loss that is a large part of the gradient:

    python -m benchmarks.parity_matrix ... --shape qwen3-moe-1m --world-sizes 1,2
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import processes
from benchmarks.models import SHAPES, build

PADDED, PACKED = (
    ["--data.max_length", "256"],
    ["--data.packing", "--data.max_length", "256", "--data.pack_length", "512"],
)
ONE, THREE = (["--training.per_device_train_batch_size", rows] for rows in ("3", "1"))  # accumulated at 4 ranks
FULL, QLORA = ["--model.full_finetuning", "--training.learning_rate", "2e-5"], ["--model.load_in_4bit"]
# 13 rows in steps of 12: the second step holds one row, and eleven without a label.
MASKED = ["--data.train_file", "THIRTEEN"]
CASES: dict[str, list[str]] = {
    "LoRA, padded, accumulation 1": [*PADDED, *ONE],
    "LoRA, padded, accumulation 3": [*PADDED, *THREE],
    "LoRA, packed, accumulation 1": [*PACKED, *ONE],
    "LoRA, packed, accumulation 3": [*PACKED, *THREE],
    "LoRA, packed, modules_to_save": [*PACKED, *THREE, "--lora.modules_to_save", "[lm_head]"],
    "LoRA, packed, no checkpointing": [*PACKED, *THREE, "--training.gradient_checkpointing", "false"],
    "LoRA, padded, ranks without a label": [*PADDED, *ONE, *MASKED],
    "full, packed, accumulation 1": [*PACKED, *ONE, *FULL],
    "full, packed, accumulation 3": [*PACKED, *THREE, *FULL],
    "full, padded, accumulation 1": [*PADDED, *ONE, *FULL],
    "full, padded, accumulation 3": [*PADDED, *THREE, *FULL],
    "QLoRA, packed, accumulation 1": [*PACKED, *ONE, *QLORA],
    "QLoRA, packed, accumulation 3": [*PACKED, *THREE, *QLORA],
    "QLoRA, padded, accumulation 1": [*PADDED, *ONE, *QLORA],
    "QLoRA, padded, accumulation 3": [*PADDED, *THREE, *QLORA],
}
# Of a mixture of experts, in 12 rows on 2 ranks.
ATTENTION = ["--lora.target_modules", "[q_proj, k_proj, v_proj, o_proj]"]
OF_MIXTURES = {
    f"{what}, {layout}, accumulation {12 // 2 // int(rows)}": [
        *("--training.router_aux_loss_coef", "0.5", "--training.per_device_train_batch_size", rows),
        *words,
        *lengths,
    ]
    for what, words in {"LoRA on attention": ATTENTION, "LoRA with experts": [], "full": FULL}.items()
    for layout, lengths in {"padded": PADDED, "packed": PACKED}.items()
    for rows in ("6", "3")
}


WRITING = threading.Lock()


def main() -> int:
    """Run the cases that are asked for on the backends that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--eval", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--world-sizes", default="1,2,4")
    parser.add_argument("--strategies", default="ddp", help="ddp, shard or both, as of `finetune parity`")
    parser.add_argument("--shape", default="llama-1m", choices=list(SHAPES))
    parser.add_argument("--backends", nargs="+", default=["unsloth", "transformers"])
    parser.add_argument("--cases", nargs="+", default=[""], help="only those whose name holds one of these")
    parser.add_argument("--jobs", type=int, default=1, help="cases side by side: results do not depend on speed")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    processes.end_with_this_one()
    few, held_out = options.work / "few.jsonl", options.work / "held_out.jsonl"
    few.write_text("".join(options.train.open(encoding="utf-8").readlines()[:13]), encoding="utf-8")
    held_out.write_text("".join(options.eval.open(encoding="utf-8").readlines()[:16]), encoding="utf-8")
    model = build(options.work / options.shape, options.shape, options.train)
    known = OF_MIXTURES if "num_experts" in SHAPES[options.shape] else CASES
    chosen = [name for name in known if any(part in name for part in options.cases)]
    cases = [(backend, name) for backend in options.backends for name in chosen]

    def one(case: tuple[str, str]) -> bool:
        backend, name = case
        words = [word.replace("THIRTEEN", str(few)) for word in known[name]]
        found = prove(options, words, backend, model, held_out)
        verdict = "equal" if found["proven"] else f"NOT PROVEN {found.get('said', '')}"
        with WRITING:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"backend": backend, "case": name, "shape": options.shape, **found}) + "\n")
            sys.stdout.write(f"{backend:12} {name:36} {found['seconds']:4.0f} s  {verdict}\n")
            sys.stdout.flush()
        return found["proven"]

    with ThreadPoolExecutor(options.jobs) as pool:
        return int(not all(list(pool.map(one, cases))))


def prove(options: argparse.Namespace, words: list[str], backend: str, model: Path, held_out: Path) -> dict:
    """One case; every tensor's figures are reduced to the worst three."""
    report = Path(tempfile.mkdtemp(dir=options.work)) / "report.json"
    command = [sys.executable, "-m", "finetune.parity", "--world-sizes", options.world_sizes, "--steps", "3"]
    command += ["--strategies", options.strategies, "--json", str(report)]
    command += ["--model.model_name_or_path", str(model), "--model.backend", backend]
    command += ["--data.columns", "{instruction: question, output: answer}", "--data.eval_file", str(held_out)]
    command += ["--training.global_batch_size", "12"]
    if "--data.train_file" not in words:
        command += ["--data.train_file", str(options.train)]
    began = time.monotonic()
    env = os.environ | {"FINETUNE_CACHE": os.environ.get("FINETUNE_CACHE", str(options.work / "cache"))}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        processes.run([*command, *words], env=env, output=output)
        output.seek(0)
        said = output.read()
    seconds = time.monotonic() - began
    if not report.is_file():
        return {"proven": False, "seconds": seconds, "said": said[-2000:]}
    found = json.loads(report.read_text())
    for one in found["found"]:
        one["tensors"] = one["tensors"][:3]
    return found | {"seconds": seconds, "date": time.strftime("%Y-%m-%d")}


if __name__ == "__main__":
    raise SystemExit(main())
