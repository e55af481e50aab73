"""FP8 frozen weights on a GPU: the kernels against PyTorch, the speed of training against bfloat16, the effect on loss.

    python -m benchmarks.fp8_gpu --train train.jsonl --work DIR --out FILE.jsonl [--only NAME,NAME]

Each measurement appends one JSON line to FILE. `kernels` compares with the same computation on the CPU or in bfloat16.
`speed` trains the same packs in turn as before `adapted`, in bfloat16 and in FP8, in this process. `loss` trains a
small model in full on one half of the rows, and then a LoRA on the other half, on its weights in bfloat16, FP8 and NF4;
it needs a process without Unsloth, so one in which `speed` did not run.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import models
from finetune.config import load
from finetune.runtime import bootstrap

# Name: shape, tokens of a pack, packs of a step, steps, runs of each kind.
SPEED = {
    "speed 1.2b": ("llama-1.2b", 16384, 2, 30, 2),
    "speed 8b": ("llama-8b", 8192, 2, 16, 1),
    "speed 1m": ("llama-1m", 512, 2, 10, 2),  # for a CPU
}
LOSS = {"loss 190m": ("llama-190m", 2048, 6), "loss 1m": ("llama-1m", 512, 4)}


def main() -> int:
    """Run the measurements. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--train", type=Path, required=True, help="JSON lines with question and answer, as GSM8K")
    parser.add_argument("--work", type=Path, required=True, help="scratch folder")
    parser.add_argument("--out", type=Path, required=True, help="file to append the JSON lines to")
    parser.add_argument("--only", required=True, help="kernels, speed 1.2b, speed 8b, loss 190m; separated by commas")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    for name in given.only.split(","):
        found = kernels() if name == "kernels" else (speed if name in SPEED else loss)(name, given)
        line = json.dumps({"measurement": name, "versions": bootstrap.versions()} | found)
        with given.out.open("a") as out:
            out.write(line + "\n")
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    return 0


# --- kernels ----------------------------------------------------------------------------------------------------------


def kernels() -> dict[str, Any]:
    """Differences from PyTorch, and milliseconds of all linear layers of a decoder layer, forward and backward."""
    import torch

    from finetune.engine.kernels import fp8, fused_lora

    torch.manual_seed(0)
    equal = {}
    for columns in (512, 2048, 8192, 14336):
        x = (
            torch.randn(300, columns, device="cuda", dtype=torch.bfloat16)
            * torch.rand(300, 1, device="cuda").bfloat16()
        )
        x[7] = 0
        values, scales = fp8.quantize(x)
        expected, expected_scales = fp8.quantize(x.cpu())
        same = values.view(torch.uint8).cpu() == expected.view(torch.uint8)
        equal[columns] = bool(same.all()) and torch.equal(scales.cpu(), expected_scales)
    gate, up, d = (torch.randn(15, 8192, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dgate, dup, _ = fused_lora.silu_and_multiply_backward(gate.detach(), up.detach(), d.detach())
    ours = [fused_lora.silu_and_multiply(gate.detach(), up.detach())[0], dgate, dup]
    exact = torch.nn.functional.silu(gate.float()) * up.float()
    theirs = [exact, *torch.autograd.grad(exact, (gate, up), d.float())]
    silu = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(ours, theirs, strict=True)]
    shapes = {
        "8b": (4096, 1024, 14336, 8192),
        "1.2b": (2048, 512, 8192, 16384),
        "1.5b": (1536, 256, 8960, 16384),
        "0.6b": (1024, 1024, 3072, 32768),
        "0.5b": (896, 128, 4864, 32768),
        "135m": (576, 192, 1536, 32768),
    }
    return {"quantize_equals_cpu": equal, "silu_errors": silu,
            "adapters_in_silu": {name: adapters_in_silu(shape[3], shape[2]) for name, shape in shapes.items()},
            "decoder_layer": {name: decoder_layer(*shape) for name, shape in shapes.items()}}  # fmt: skip


def adapters_in_silu(tokens: int, inner: int, rank: int = 16) -> dict[str, Any]:
    """Products with the adapters' factors within the kernels of silu(gate) * up, and as matrix products of their own:
    milliseconds, forward and backward, and the relative errors of both against float64."""
    import torch

    from finetune.engine.kernels import fused_lora
    from finetune.engine.kernels.low_rank import LowRankTerm

    gate, up, dh = (torch.randn(tokens, inner, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device="cuda", dtype=torch.bfloat16)

    first, second, third = terms = [LowRankTerm(random(tokens, rank), random(rank, inner), 0.1) for _ in range(3)]
    down = random(rank, inner)

    def added(y: torch.Tensor, term: LowRankTerm) -> torch.Tensor:
        return fused_lora.add_term(y, term, y.dtype)

    gate_kept, up_kept = added(gate, first), added(up, second)  # by the forward pass

    def forward() -> list[Any]:
        h, _, product = fused_lora.silu_and_multiply(gate, up, first, second, down)
        return [h, product]

    def forward_separate() -> list[Any]:
        h = fused_lora.silu_and_multiply(added(gate, first), added(up, second))[0]
        return [h, h @ down.t()]

    def backward() -> list[Any]:
        dgate, dup, products = fused_lora.silu_and_multiply_backward(gate, up, dh, first, second, third)
        return [dgate, dup, *products]

    def backward_separate() -> list[Any]:
        h = fused_lora.silu_and_multiply(gate_kept, up_kept)[0]
        dgate, dup, _ = fused_lora.silu_and_multiply_backward(gate_kept, up_kept, added(dh, third))
        products = [dgate.t() @ terms[0].left, dup.t() @ terms[1].left, terms[2].left.t() @ h]
        return [dgate, dup, *(0.1 * one for one in products)]

    g, u, d = (
        one.double() + term.scaling * term.left.double() @ term.right.double()
        for one, term in zip((gate, up, dh), terms, strict=True)
    )
    s = g.sigmoid()
    h, dgate, dup = g * s * u, d * u * s * (1 + g * (1 - s)), d * g * s
    lefts = [0.1 * term.left.double() for term in terms]
    exact = {
        "forward": [h, h @ down.double().t()],
        "backward": [dgate, dup, dgate.t() @ lefts[0], dup.t() @ lefts[1], lefts[2].t() @ h],
    }
    ways = {one.__name__: one for one in (forward, forward_separate, backward, backward_separate)}
    errors = {
        name: [
            float((a - b).norm() / b.norm()) for a, b in zip(way(), exact[name.removesuffix("_separate")], strict=True)
        ]
        for name, way in ways.items()
    }
    return {"milliseconds": {name: timed(way) for name, way in ways.items()}, "errors": errors}


def decoder_layer(hidden: int, keys: int, inner: int, tokens: int) -> dict[str, Any]:
    """Frozen linear layers alone, without adapters: milliseconds in bfloat16 and in FP8, and the relative errors."""
    import torch

    from finetune.engine.kernels import fp8, fused_lora

    groups = {
        "q": (hidden, [hidden]), "k v": (hidden, [keys, keys]), "o": (hidden, [hidden]),
        "gate up": (hidden, [inner, inner]), "down": (inner, [hidden]),
    }  # fmt: skip
    milliseconds, errors, ratios = {"bf16": 0.0, "fp8": 0.0}, [0.0, 0.0], {}
    for group, (width, outputs) in groups.items():
        x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        plain = [torch.nn.Linear(width, one, bias=False, device="cuda", dtype=torch.bfloat16) for one in outputs]
        plain = [one.requires_grad_(False) for one in plain]
        converted = [fp8.Linear(one) for one in plain]
        gradients = [torch.randn(tokens, one, device="cuda", dtype=torch.bfloat16) for one in outputs]
        forms = {
            "bf16": lambda x, p=plain: [one(x) for one in p],
            "fp8": lambda x, c=converted: fused_lora.project(x, c),
        }
        results, took = {}, {}
        for name, form in forms.items():

            def once(form: Any = form, x: Any = x, gradients: Any = gradients) -> Any:
                y = form(x)
                return [*y, *torch.autograd.grad(y, x, gradients)]

            took[name] = timed(once)
            milliseconds[name] += took[name]
            results[name] = [once()[0], once()[-1]]
        ratios[group] = took["bf16"] / took["fp8"]
        for place in (0, 1):
            a, b = (results[name][place].float() for name in ("fp8", "bf16"))
            errors[place] = max(errors[place], float((a - b).norm() / b.norm()))
    return milliseconds | {"ratio": milliseconds["bf16"] / milliseconds["fp8"], "ratios": ratios,
                           "output_error": errors[0], "input_gradient_error": errors[1]}  # fmt: skip


def timed(function: Any, repeats: int = 20) -> float:
    """Milliseconds of one call, by CUDA events."""
    import torch

    for _ in range(4):
        function()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


# --- training ---------------------------------------------------------------------------------------------------------

KINDS = {
    "before": [],  # adapters computed by Unsloth or PEFT
    "bf16": [],
    "fp8": ["--model.load_in_fp8", "true"],
    "nf4": ["--model.load_in_4bit", "true"],
}


def train(out: Path, model: Path, rows: Path, *arguments: str, before: bool = False) -> dict[str, Any]:
    """Train in this process. Returns what run.json has of its speed, memory and losses."""
    import torch

    from finetune import train as program
    from finetune.engine.kernels import fused_lora

    words = [
        *("--model.model_name_or_path", str(model), "--data.train_file", str(rows)),
        *("--data.columns", "{instruction: question, output: answer}", "--data.packing", "true"),
        *("--training.output_dir", str(out), "--training.overwrite_output_dir", "true", "--training.save_steps", "0"),
        *("--logging.generate_samples", "0", *arguments),
    ]
    install = fused_lora.install
    if before:
        fused_lora.install = lambda model: 0
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    try:
        program.run(load(words, command="train"))
    finally:
        fused_lora.install = install
    gc.collect()
    record = json.loads((out / "run.json").read_text())
    names = ("tokens_per_second_per_gpu", "step_seconds_median", "mfu", "peak_memory_gib", "eval_loss_before",
             "eval_loss_after", "losses", "hardware")  # fmt: skip
    return {"seconds": time.perf_counter() - began} | {name: record.get(name) for name in names}


def speed(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Runs on the same packs from the same seed, in turn, and in the opposite order when repeated."""
    shape, pack, packs, steps, runs = SPEED[name]
    model = models.build(given.work / shape, shape, given.train)
    order = ["before", "bf16", "fp8"]
    found: dict[str, list[Any]] = {kind: [] for kind in order}
    for _ in range(runs):
        for kind in order:
            out = given.work / f"{name.replace(' ', '-')}-{kind}"
            batch = ("--training.global_batch_size", str(packs), "--data.max_length", str(pack))
            length = ("--training.max_steps", str(steps), "--training.gradient_checkpointing", "false")
            found[kind].append(train(out, model, given.train, *KINDS[kind], *batch, *length, before=kind == "before"))
        order.reverse()
    medians = {kind: [one["step_seconds_median"] for one in kept] for kind, kept in found.items()}
    ratios = {kind: [a / b for a, b in zip(medians["before"], medians[kind], strict=True)] for kind in ("bf16", "fp8")}
    return {"steps": steps, "pack": pack, "packs_per_step": packs, "over_before": ratios, "runs": found}


def loss(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Held-out loss before and after training a LoRA, on the same trained weights in three forms."""
    shape, pack, epochs = LOSS[name]
    lines = given.train.read_text(encoding="utf-8").splitlines(keepends=True)
    held_out, half = len(lines) // 15, len(lines) // 2
    parts = {"held": lines[:held_out], "first": lines[held_out:half], "second": lines[half:]}
    files = {part: given.work / f"{part}.jsonl" for part in parts}
    for part, file in files.items():
        file.write_text("".join(parts[part]), encoding="utf-8")
    model, trained = models.build(given.work / shape, shape, given.train), given.work / f"trained-{shape}"
    common = ("--data.max_length", str(pack), "--data.eval_file", str(files["held"]), "--model.backend", "transformers")
    batch = ("--training.global_batch_size", "8")
    full = ("--model.full_finetuning", "true", "--training.learning_rate", "5e-4")
    length = ("--training.num_train_epochs", str(epochs))
    found = {"full": train(trained, model, files["first"], *common, *batch, *full, *length)}
    for kind, arguments in KINDS.items():
        out = given.work / f"lora-{kind}"
        found[kind] = train(
            out, trained, files["second"], *common, *batch, *arguments, "--training.num_train_epochs", "2"
        )
    return {"pack": pack, "epochs_in_full": epochs, "runs": found}


if __name__ == "__main__":
    raise SystemExit(main())
