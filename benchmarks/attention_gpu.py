"""Kernels on a GPU: of attention over packs alone, and what they and those of the layers do to a step and its losses.

    python -m benchmarks.attention_gpu --train train.jsonl --work DIR --out FILE.jsonl [--only NAME,NAME]

Each measurement appends one JSON line. `kernels` compares FlashAttention-4 with torch's kernel, both also with float64
on the CPU at a small size. The others train the same packs from the same seed, once with each kind of attention or of
layers and again in the opposite order, every run in a process of its own. The second kind is what a run uses where it
can: if it is slower than the first, or its last loss is higher, by more than LIMITS, the exit code is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.processes import run, say
from finetune.review import gate

ROOT = Path(__file__).parent.parent
KINDS = {
    "sdpa": ["--model.attn_implementation", "sdpa"],
    "torch": ["--model.packed_attention", "torch"],
    "flash_4": ["--model.packed_attention", "flash_4"],
    "auto": [],
    "layers torch": ["--model.layer_kernels", "torch"],
    "layers liger": ["--model.layer_kernels", "liger"],
}
LIMITS = {"--max-slowdown": 2.0, "--max-loss-increase": 0.1}  # percent, of the second kind over the first
QLORA = ("--model.load_in_4bit", "true")
FULL = ("--model.full_finetuning", "true", "--training.learning_rate", "2e-5")
# Name: shape, backend, tokens of a pack, packs of a step, steps, kinds compared, what all of them are given.
TRAINING: dict[str, tuple[str, str, int, int, int, tuple[str, str], tuple[str, ...]]] = {
    "transformers 1.2b": ("llama-1.2b", "transformers", 16384, 1, 16, ("sdpa", "torch"), ()),
    "transformers 1.2b qlora": ("llama-1.2b", "transformers", 16384, 1, 16, ("sdpa", "torch"), QLORA),
    "unsloth 1.2b": ("llama-1.2b", "unsloth", 16384, 1, 30, ("torch", "auto"), ()),
    "unsloth 1.2b full": ("llama-1.2b", "unsloth", 16384, 1, 20, ("torch", "flash_4"), FULL),
    "unsloth 8b": ("llama-8b", "unsloth", 8192, 1, 20, ("torch", "auto"), ()),
    "liger 1.2b": ("llama-1.2b", "transformers", 16384, 1, 20, ("layers torch", "layers liger"), ()),
    "liger 1.2b qlora": ("llama-1.2b", "transformers", 16384, 1, 20, ("layers torch", "layers liger"), QLORA),
    "1m": ("llama-1m", "transformers", 256, 1, 4, ("sdpa", "auto"), ()),  # for a CPU
}
# Tokens in all, tokens of a document, query heads, key heads, head dimension: of 1.2 B and of 8 B.
SHAPES = {
    "1.2b, documents of 512": (16384, 512, 32, 8, 64),
    "1.2b, documents of 2,048": (16384, 2048, 32, 8, 64),
    "8b, documents of 512": (8192, 512, 32, 8, 128),
    "8b, documents of 4,096": (8192, 4096, 32, 8, 128),
    "8b, one document of 16,384": (16384, 16384, 32, 8, 128),
}


def main() -> int:
    """Run the measurements. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--train", type=Path, required=True, help="JSON lines with question and answer, as GSM8K")
    parser.add_argument("--work", type=Path, required=True, help="scratch folder")
    parser.add_argument("--out", type=Path, required=True, help="file to append the JSON lines to")
    parser.add_argument("--only", default="kernels", help="separated by commas: kernels, " + ", ".join(TRAINING))
    parser.add_argument("--runs", type=int, default=2, help="of each kind")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in given.only.split(","):
        found = {"measurement": name} | (kernels() if name == "kernels" else training(name, given))
        with given.out.open("a") as out:
            out.write(json.dumps(found) + "\n")
        say(json.dumps(found))
        failed |= bool(found.get("error") or found.get("breaches"))
    return int(failed)


def kernels() -> dict[str, Any]:
    """Choices at several shapes, seconds to the first result, and both kernels' distances from float64."""
    from finetune.runtime.machine import flash

    flash.install_switch()
    import torch

    from finetune.engine.kernels import attention

    began, found = time.perf_counter(), {}
    for name, (tokens, length, heads, keys, dim) in SHAPES.items():
        lengths = (length,) * (tokens // length)
        shapes = attention.AttentionShapes(
            heads=heads, key_value_heads=keys, head_dim=dim, lengths=lengths, dtype=torch.bfloat16
        )
        choice = attention.choose("auto", shapes, "cuda")
        found[name] = dataclasses.asdict(choice) | {"seconds": time.perf_counter() - began}
        began = time.perf_counter()
    return {"shapes": found, "from_float64": {str(on): from_float64(on) for on in (False, True)}}


def from_float64(on: bool) -> list[float]:
    """Relative distances of output and gradients from the same attention in float64, of one kernel."""
    import torch
    from torch.nn.attention.varlen import varlen_attn

    from finetune.engine.kernels import attention
    from finetune.runtime.machine import flash

    shapes = attention.AttentionShapes(
        heads=8, key_value_heads=2, head_dim=64, lengths=(130, 7, 259), dtype=torch.bfloat16
    )
    flash.set_enabled(on)
    results, _ = attention.measure(varlen_attn, shapes, "cuda")
    flash.set_enabled(False)

    def exact(query: Any, key: Any, value: Any, bounds: Any, *given: Any, **options: Any) -> Any:
        outputs = []
        for begin, end in zip(bounds.tolist()[:-1], bounds.tolist()[1:], strict=True):
            q, k, v = (tensor[begin:end].transpose(0, 1).double() for tensor in (query, key, value))
            k, v = (tensor.repeat_interleave(q.shape[0] // k.shape[0], dim=0) for tensor in (k, v))
            later = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device).triu(1)
            weights = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf).softmax(-1)
            outputs.append((weights @ v).transpose(0, 1))
        return torch.cat(outputs).to(query.dtype)

    expected, _ = attention.measure(exact, shapes, "cuda")
    return [attention.difference(one, other) for one, other in zip(results, expected, strict=True)]


def training(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Runs of each kind in turn: seconds of a median step, losses, memory, and how far the losses are apart."""
    shape, backend, pack, packs, steps, kinds, extra = TRAINING[name]
    model = models.build(given.work / shape, shape, given.train)
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    order = list(kinds)
    for _ in range(given.runs):
        for kind in order:
            out = given.work / "out"
            words = [
                *("--model.model_name_or_path", model.resolve(), "--model.backend", backend),
                *("--data.train_file", given.train.resolve(), "--data.packing", "true"),
                *("--data.columns", "{instruction: question, output: answer}", "--data.max_length", pack),
                *("--training.output_dir", out.resolve(), "--training.overwrite_output_dir", "true"),
                *("--training.max_steps", steps, "--training.global_batch_size", packs, "--training.save_steps", 0),
                *("--training.gradient_checkpointing", "false", "--logging.generate_samples", 0),
                *(*extra, *KINDS[kind]),
            ]
            with (given.work / "output.txt").open("w") as output:
                command = [sys.executable, "-m", "finetune.train", *map(str, words)]
                code = run(command, cwd=ROOT, output=output, timeout=300)
            if code != 0:
                return {"kind": kind, "error": (given.work / "output.txt").read_text().splitlines()[-15:]}
            record = json.loads((out / "run.json").read_text())
            names = (
                "status",
                "step_seconds_median",
                "tokens_per_second_per_gpu",
                "peak_memory_gib",
                "losses",
                "attention",
                "layer_kernels",
                "versions",
                "hardware",
            )
            runs[kind].append({key: record.get(key) for key in names})
    first, last = (runs[kind] for kind in (kinds[0], kinds[-1]))
    ratios = [a["step_seconds_median"] / b["step_seconds_median"] for a, b in zip(first, last, strict=True)]
    apart = [abs(a - b) / a for a, b in zip(first[0]["losses"], last[0]["losses"], strict=True)]
    pairs = zip(first, last, strict=True)
    compared = [one for a, b in pairs for one in gate.compare({kinds[0]: a, kinds[-1]: b}, LIMITS)]
    breaches = [str(one) for one in compared if one.breached]
    return {"speedup": ratios, "largest_loss_difference": max(apart), "breaches": breaches, "runs": runs}


if __name__ == "__main__":
    raise SystemExit(main())
