"""What only a GPU can show. Run on one H200: `python -m pytest -m gpu tests/gpu`; on two: `-m multigpu`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers import kernels, launch, tiny

# Not "error": torchao, which only an installation for GPUs has, warns while it is imported.
pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("default")]

LIMITED = """
import sys
import torch
torch.cuda.set_per_process_memory_fraction({fraction})
from finetune import train
sys.exit(train.main())
"""


PROFILES = ("single.yaml", "ddp_2.yaml")

# Counts what makes the host wait for the GPU between steps 5 and 10, on rank 0.
WAITS = """
import os, sys, warnings
from pathlib import Path
import torch
from transformers import TrainerCallback
from finetune.runtime.ranks import distributed
from finetune import train

from finetune.engine.session import building
build, waits = building.build_trainer, []


class Watch(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 4:
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *rest, **more: waits.append(str(message))
            torch.cuda.set_sync_debug_mode("warn")

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 10:
            torch.cuda.set_sync_debug_mode("default")
            if distributed.ranks().is_main:
                Path(os.environ["WAITS"]).write_text("\\n".join(one for one in waits if "synchronizing" in one))


def build_watched(*arguments, **named):
    built = build(*arguments, **named)
    trainer = built.trainer
    trainer.add_callback(Watch())
    return built


building.build_trainer = build_watched
sys.exit(train.main())
"""

# DDP of 1 GiB of bfloat16 weights, two micro-batches a step, in the first step the host ahead of the GPU: each rank's
# peak in the second step over its peak in the third, in MiB.
BUCKETS = """
import os
import torch
import torch.distributed as dist
from finetune.runtime.ranks import distributed

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
layers = [torch.nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16) for _ in range(32)]
model = torch.nn.Sequential(*layers).cuda()
ddp = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank], gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-6)
rows = torch.ones(16384, 4096, dtype=torch.bfloat16, device="cuda")
torch.autograd.grad(model(rows).mean(), list(model.parameters()))  # loads the kernels
peaks = []
for step in range(3):
    torch.cuda.reset_peak_memory_stats()
    with ddp.no_sync():
        ddp(rows).mean().backward()
    loss = ddp(rows).mean()
    if step == 0:
        torch.cuda._sleep(2_000_000_000)  # cycles, about a second of the GPU's
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    peaks.append(torch.cuda.max_memory_allocated() / 2**20)
    if step == 0 and os.environ["AWAY"] == "1":
        distributed.drain_nccl_work()
print(f"RESULT {rank} {peaks[1] - peaks[2]:.1f}\\n", end="", flush=True)
dist.destroy_process_group()
"""


# The same weights, two micro-batches a step with more activations than gradients: each rank's peak, in MiB.
HELD = """
import contextlib
import os
import types
import torch
import torch.distributed as dist
from finetune.runtime.ranks import distributed
from finetune.engine.training.ddp_buckets import DdpBuckets

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
layers = [torch.nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16) for _ in range(32)]
ddp = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(*layers).cuda(), device_ids=[rank], gradient_as_bucket_view=True
)
buckets = DdpBuckets()
rows = torch.ones(16384, 4096, dtype=torch.bfloat16, device="cuda")
for step in range(3):
    for last in (False, True):
        with contextlib.nullcontext() if last else ddp.no_sync():
            if os.environ["KEPT"] == "1":
                buckets.before_micro_batch(ddp, reduces=last)
            ddp(rows).mean().backward()
            buckets.after_micro_batch(ddp)
    ddp.zero_grad()
print(f"RESULT {rank} {torch.cuda.max_memory_allocated() / 2**20:.1f}\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.make_model(tmp_path / "model")
    tiny.make_rows(tmp_path / "train.jsonl", 64, longest=150)
    return tmp_path


def arguments(folder: Path, *extra: str) -> list[str]:
    return [
        "--model.model_name_or_path",
        str(folder / "model"),
        "--data.train_file",
        str(folder / "train.jsonl"),
        *extra,
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("dry", [False, True], ids=["run", "dry run"])
def test_out_of_memory_says_what_to_change(folder: Path, dry: bool) -> None:
    """`python -m pytest -m gpu tests/gpu` on one GPU. The allocator is held to a sliver of the card."""
    script = folder / "limited.py"
    script.write_text(LIMITED.format(fraction=0.0008))  # about 110 MiB of an H200
    batch = ["--training.global_batch_size", "64", "--training.per_device_train_batch_size", "64"]
    extra = [*batch, "--training.gradient_checkpointing", "false", "--model.backend", "transformers"]
    out = ["--training.output_dir", str(folder / "out"), *(["--dry-run"] if dry else [])]
    done = launch.run("python", arguments(folder, *extra, *out), cache=folder, script=script)
    words = " ".join(done.stdout.split())
    assert done.returncode == 1, done.stdout[-4000:]
    assert "CUDA ran out of memory" in words and "Traceback" not in words, words[-3000:]
    if dry:
        assert "NO-GO" in words and not (folder / "out").exists()
    else:
        assert "per_device_train_batch_size to 32" in words
        assert launch.read(folder / "out")["status"] == "failed"


@pytest.mark.gpu
@pytest.mark.parametrize("full", [False, True], ids=["LoRA", "full"])
@pytest.mark.parametrize("backend", [pytest.param("unsloth", marks=pytest.mark.unsloth), "transformers"])
def test_packed_documents_are_as_if_alone(folder: Path, backend: str, full: bool) -> None:
    """`python -m pytest -m gpu tests/gpu` on one GPU: bfloat16, logits and gradients to 1e-2. Where all weights are
    trained Unsloth takes transformers' own layers, compiled, with another attention than for LoRA."""
    extra = ["--model.full_finetuning", "true", "--training.learning_rate", "2e-5"] if full else []
    found = launch.packed_against_alone(folder / "model", backend, [1, 5, 40], *extra, cache=folder, how="python")
    sys.stdout.write(f"{backend} {found}\n")
    for one in found:
        assert one["logits"] < 1e-2 and one["gradient"] < 1e-2 and one["loss"] < 1e-3, one


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "ranks", [(None, None, None), (16, 16, 16), (None, 5, 32), (8, 80, None), (64, 48, 64), (4, None, 80)]
)
def test_kernels_of_an_mlp_add_its_adapters(kind: str, ranks: tuple[int | None, ...]) -> None:
    """Against float64 and autograd; sizes that no tile divides. One GPU."""
    import torch

    from finetune.engine.kernels import fused_lora
    from finetune.engine.kernels.low_rank import LowRankTerm

    torch.manual_seed(0)
    dtype, tolerance = getattr(torch, kind), {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}[kind]
    sizes = {"device": "cuda", "dtype": dtype}
    gate, up, dh = (torch.randn(333, 1000, **sizes) for _ in range(3))
    down = None if ranks[2] is None else torch.randn(ranks[2], 1000, **sizes)
    terms, exact = [], []
    for y, rank in zip((gate, up, dh), ranks, strict=True):
        left, right = (
            torch.randn(333, 2 * (rank or 1), **sizes)[:, 1 : 1 + (rank or 1)],
            torch.randn(1000, rank or 1, **sizes),
        )
        terms.append(None if rank is None else LowRankTerm(left, right.t(), 0.3))
        exact.append(y.double() + (0 if rank is None else 0.3 * left.double() @ right.double().t()))
    g, u = (one.requires_grad_() for one in exact[:2])
    h = torch.nn.functional.silu(g) * u
    dg, du = torch.autograd.grad(h, (g, u), exact[2])
    lefts = [None if one is None else 0.3 * one.left.double() for one in terms]
    products = [None if left is None else y.T @ left for y, left in zip((dg, du, h), lefts, strict=True)]
    if products[2] is not None:
        products[2] = products[2].T  # left^T h
    expected = [h, None if down is None else h @ down.double().T, dg, du, *products]
    *gradients, found = fused_lora.silu_and_multiply_backward(gate, up, dh, *terms)
    h, _, inner = fused_lora.silu_and_multiply(gate, up, *terms[:2], down)
    found = [h, inner, *gradients, *found]
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.shape == other.shape and (one.dtype == dtype or index > 3)
            assert float(((one - other).norm() / other.norm()).detach()) < tolerance, index


@pytest.mark.gpu
def test_gradients_of_attention_with_a_mask_are_finite() -> None:
    """With the patch, whatever kernel torch prefers, for every remainder of the length."""
    import torch

    from patches import core, torch_cudnn_attention_nan

    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        core.run([torch_cudnn_attention_nan])
        for length in range(32, 321, 32):
            query, key, value = (torch.randn(1, 2, length, 64, device="cuda").bfloat16() for _ in range(3))
            query[..., 0], key[..., 0] = 1.0, -960.0  # scores of -120
            query.requires_grad_()
            mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()[None, None]
            torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask).sum().backward()
            assert query.grad is not None and query.grad.isfinite().all(), length
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.gpu
@pytest.mark.unsloth
def test_rotary_gradients_keep_their_layout() -> None:
    """Unsloth's rotary embedding with the patch against without it, over packs. One GPU."""
    import torch
    from unsloth.kernels import rope_embedding

    from patches import core
    from patches import unsloth_rope_gradient_layout as patch

    indices = torch.arange(70, device="cuda", dtype=torch.int32).remainder(33)
    angles = torch.randn(2, 33, 64, device="cuda", dtype=torch.bfloat16)

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(0)
        inputs, given = (
            [torch.randn(1, 70, heads, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for heads in (6, 2)]
            for _ in range(2)
        )
        inputs = [one.requires_grad_() for one in inputs]
        outputs = rope_embedding.fast_rope_embedding(*inputs, *angles, indices)
        return list(torch.autograd.grad(outputs, inputs, given))

    before = gradients()
    assert core.run([patch])[0].applied
    for one, other in zip(gradients(), before, strict=True):
        assert torch.equal(one, other)
        assert one.transpose(1, 2).is_contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_ligers_kernels_compute_what_transformers_does(kind: str, gate: str) -> None:
    """Loss and all gradients of a small model in float32, before and after; Liger has no gate with gelu here."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from finetune.engine.kernels import liger

    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 2, "vocab_size": 300, "head_dim": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": gate}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **heads)).to("cuda", torch.float32)
    ids = torch.randint(0, 300, (2, 37), device="cuda")

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return [loss.detach(), *(one.grad.clone() for one in model.parameters())]

    before = step()
    liger.install(model)
    assert "Liger" in model.model.layers[0].input_layernorm._get_name()
    assert ("liger" in model.model.layers[0].mlp.forward.__func__.__module__) == (gate == "silu")
    for one, other in zip(step(), before, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", kernels.KINDS)
def test_experts_with_adapters_compute_what_peft_does(kind: str) -> None:
    """`python -m pytest -m gpu tests/gpu` on one GPU: loss and gradients in float32."""
    model = kernels.with_adapter(kernels.model_of(kind, **kernels.KINDS[kind]), kernels.BOTH).cuda()
    assert kernels.check_experts(model) > 0


@pytest.mark.gpu
def test_experts_in_bfloat16_compute_what_they_do_on_a_cpu() -> None:
    """`python -m pytest -m gpu tests/gpu` on one GPU: also an expert that has no token, whose gradients are zeros."""
    import torch

    from finetune.engine.kernels.grouped_experts import Experts, _Experts

    torch.manual_seed(0)
    number, tokens, k, m, rank = 6, 96, 64, 48, 16
    module = SimpleNamespace(
        gate_up_proj=torch.randn(number, 2 * m, k) / k**0.5, down_proj=torch.randn(number, k, m) / m**0.5
    )
    shapes = [(number, rank, k), (number, rank, 2 * m), (number, rank, m), (number, rank, k)]
    inputs = [torch.randn(tokens, k), torch.rand(tokens, 2), *(torch.randn(*shape) / 8 for shape in shapes)]
    chosen = torch.stack([torch.randperm(number - 1)[:2] for _ in range(tokens)])
    gradient = torch.randn(tokens, k)
    found = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        own = SimpleNamespace(**{name: one.to(device, dtype) for name, one in vars(module).items()})
        x, weights, *factors = (one.detach().to(device, dtype).requires_grad_() for one in inputs)
        y = _Experts.apply(x, weights, chosen.to(device), Experts(own, (0.5, 2.0)), *factors)
        y.backward(gradient.to(device, dtype))
        found.append([y.detach(), *(one.grad for one in (x, weights, *factors))])
    for exact, one in zip(*found, strict=True):
        one = one.cpu().float()
        assert torch.nn.functional.cosine_similarity(exact.flatten(), one.flatten(), dim=0) > 0.9995
        assert one.norm() == pytest.approx(float(exact.norm()), rel=0.01)
    assert all(bool((one[-1] == 0).all()) for one in found[1][3:])


@pytest.mark.gpu
def test_what_is_kept_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m pytest -m gpu tests/gpu` on one GPU: gradients in bfloat16 with each kind of recomputation and tiled
    MLPs, several passes after another, and the memory between and in the passes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from finetune.engine.training import recompute, tiled_mlp

    monkeypatch.setattr(tiled_mlp, "LEAST", 512)
    layers, tokens, hidden = 8, 16_384, 1024
    heads = dict(num_attention_heads=8, num_key_value_heads=4, vocab_size=128, use_cache=False)
    shape: dict = dict(hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers) | heads
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape)).to("cuda", torch.bfloat16).train()
    ids = torch.randint(1, 128, (1, tokens), device="cuda")
    direction = torch.randn(hidden, device="cuda")  # a normalized vector's length alone has no gradient
    stack: Any = SimpleNamespace(backend="transformers", device="cuda")
    kept, peak, found = {}, {}, {}
    for kind in (False, True, "selective", "offload"):
        for tiled in (False, True):
            recompute.apply(model, recompute.Recomputation(kind=kind, tiled_mlp=tiled), stack)
            for _ in range(3):
                model.zero_grad(set_to_none=True)
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                loss = (model.model(ids).last_hidden_state.float() @ direction).square().mean()
                kept[kind, tiled] = torch.cuda.memory_allocated() - before
                loss.backward()
                peak[kind, tiled] = torch.cuda.max_memory_allocated() - before
            found[kind, tiled] = {name: one.grad.float() for name, one in model.model.named_parameters()}
    for key, gradients in found.items():
        for name, one in found[False, False].items():
            assert float((gradients[name] - one).norm() / one.norm()) < 0.02, (key, name)
    row = tokens * hidden * 2
    assert kept["offload", False] <= kept[True, False] - (layers - 3) * row
    assert kept[True, False] + layers * row <= kept["selective", False] < kept[False, False]
    assert all(peak[kind, True] < peak[kind, False] - 2 * row for kind in (False, True, "selective", "offload"))


@pytest.mark.gpu
def test_the_demo_learns_on_a_gpu(tmp_path: Path) -> None:
    """`python -m pytest -m gpu tests/gpu` on one GPU."""
    run = launch.train("accelerate", ["--demo"], out=tmp_path / "out", cache=tmp_path)
    assert run["hardware"]["device"] == "cuda"
    assert run["exact_match_after"] >= 0.9


def with_and_without_graphs(folder: Path, how: str, backend: str, *extra: str) -> tuple[dict, dict]:
    """run.json of a run on packs without and with recorded passes."""
    words = ["--model.backend", backend, "--training.gradient_checkpointing", "false", "--training.max_steps", "8"]
    words += ["--data.packing", "--data.max_length", "200", "--data.pack_length", "512", "--logging.logging_steps", "1"]
    words += ["--logging.generate_samples", "0", "--training.eval_steps", "3", "--data.eval_fraction", "0.1"]
    words += ["--training.learning_rate", "1e-3", *extra]
    found = []
    for wanted in ("false", "true"):
        out = folder / f"{backend}-{wanted}"
        given = [*arguments(folder, *words), "--training.cuda_graphs", wanted]
        found.append(launch.train(how, given, out=out, cache=folder))
    return found[0], found[1]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "method"),
    [
        ("transformers", "lora"),
        ("transformers", "qlora"),
        ("transformers", "full"),
        ("unsloth", "lora"),
        ("unsloth", "qlora"),
    ],
)
def test_recorded_passes_train_alike(folder: Path, backend: str, method: str) -> None:
    """`python -m pytest -m gpu tests/gpu` on one GPU: losses with CUDA graphs and without, evaluations between."""
    extra = {"qlora": ["--model.load_in_4bit"], "full": ["--model.full_finetuning"]}.get(method, [])
    batch = ["--training.global_batch_size", "4", "--training.per_device_train_batch_size", "2"]
    launched, recorded = with_and_without_graphs(folder, "python", backend, *extra, *batch)
    sys.stdout.write(f"{backend} {method}: {recorded['cuda_graphs']}\n")
    assert recorded["cuda_graphs"]["used"], recorded["cuda_graphs"]
    assert recorded["losses"] == pytest.approx(launched["losses"], rel=1e-3)
    assert recorded["eval_loss_after"] == pytest.approx(launched["eval_loss_after"], rel=1e-3)


@pytest.mark.multigpu
@pytest.mark.parametrize("backend", ["transformers", "unsloth"])
def test_recorded_passes_train_alike_on_two_gpus(folder: Path, backend: str) -> None:
    """`python -m pytest -m multigpu tests/gpu` on two GPUs: gradients that DDP does not reduce."""
    batch = ["--training.global_batch_size", "8", "--training.per_device_train_batch_size", "2"]
    launched, recorded = with_and_without_graphs(folder, "ddp_2.yaml", backend, *batch)
    assert recorded["cuda_graphs"]["used"], recorded["cuda_graphs"]
    assert recorded["losses"] == pytest.approx(launched["losses"], rel=1e-3)


@pytest.mark.multigpu
def test_two_gpus_give_the_losses_of_one(folder: Path) -> None:
    """`python -m pytest -m multigpu tests/gpu` on two GPUs: bfloat16 LoRA, losses to 1e-3."""
    extra = ["--training.max_steps", "8", "--training.global_batch_size", "16", "--logging.generate_samples", "0"]
    losses = [
        launch.train(how, arguments(folder, *extra), out=folder / how, cache=folder)["losses"] for how in PROFILES
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.multigpu
@pytest.mark.parametrize("kind", ["LoRA packed", "QLoRA packed", "full padded"])
def test_two_gpus_that_share_rows_give_the_result_of_one(folder: Path, kind: str) -> None:
    """`python -m pytest -m multigpu tests/gpu` on two GPUs: `finetune parity` in bfloat16, over NCCL."""
    extra = ["--training.global_batch_size", "4", "--model.backend", "transformers", "--model.dtype", "bfloat16"]
    extra += ["--training.gradient_checkpointing", "true", "--training.per_device_train_batch_size", "2"]
    extra += ["--data.packing"] if "packed" in kind else []
    extra += {"LoRA": [], "QLoRA": ["--model.load_in_4bit"], "full": ["--model.full_finetuning"]}[kind.split()[0]]
    words = ["--strategies", "ddp,cp,shard,shard+cp", "--steps", "4", *arguments(folder, *extra)]
    done = subprocess.run(
        [sys.executable, "-m", "finetune.parity", *words],
        capture_output=True,
        text=True,
        env=launch.environment(folder),
        cwd=folder,
        timeout=launch.TIMEOUT,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.multigpu
def test_the_host_waits_no_more_often_on_two_gpus(folder: Path) -> None:
    """`python -m pytest -m multigpu tests/gpu` on two GPUs: packs on Unsloth, whose lengths stay on the host (C7)."""
    script = folder / "waits.py"
    script.write_text(WAITS)
    extra = ["--training.max_steps", "12", "--training.global_batch_size", "4", "--logging.logging_steps", "100"]
    extra += [
        "--data.packing",
        "--data.max_length",
        "128",
        "--data.pack_length",
        "256",
        "--logging.generate_samples",
        "0",
    ]
    waits = []
    for how in PROFILES:
        words = arguments(folder, *extra, "--training.per_device_train_batch_size", "1")
        out, file = ["--training.output_dir", str(folder / how)], folder / f"{how}.txt"
        done = launch.run(how, [*words, *out], cache=folder, script=script, WAITS=str(file))
        assert done.returncode == 0, done.stdout[-4000:]
        assert launch.read(folder / how)["backend"] == "unsloth"
        waits.append(file.read_text().count("synchronizing"))
    sys.stdout.write(f"waits of six steps on one and two GPUs: {waits}\n")
    assert waits[1] <= waits[0]


@pytest.mark.gpu
def test_a_dry_run_measures_this_gpu(folder: Path) -> None:
    """`python -m pytest -m gpu tests/gpu` on one GPU: times by CUDA events, the largest micro-batch found by trying."""
    report = folder / "dry.json"
    words = arguments(folder, "--training.output_dir", str(folder / "out"), "--dry-run", "--json", str(report))
    done = launch.run("python", [*words, "--training.global_batch_size", "16"], cache=folder)
    assert done.returncode == 0, done.stdout[-4000:]
    found = json.loads(report.read_text())
    sizes = found["micro_batch_search"]
    assert sizes["largest_that_fits"] == 16 and all(one["fits"] for one in sizes["attempts"])
    assert 0 < found["memory"]["peak_gib"] < found["memory"]["limit_gib"] < found["memory"]["device_gib"]
    assert found["step"]["forward"] > 0 and found["step"]["backward"] > 0 and found["projection"]["step_seconds"] > 0


@pytest.mark.multigpu
def test_two_gpus_are_seen_measured_and_told(folder: Path) -> None:
    """`python -m pytest -m multigpu tests/gpu` on two GPUs: the link of the pair, an all-reduce, doctor's topology."""
    from finetune.runtime.machine import hardware

    machine = hardware.survey()
    assert machine.count >= 2 and machine.links and machine.gpus and machine.links[0].kind
    assert not [name for name in machine.unknown if name.startswith(("link", "rate", "peer"))], machine.unknown
    report = folder / "comm.json"
    words = ["-m", "finetune.bench", "comm", "--world-sizes", "2", "--sizes", "1048576", "--runs", "2", "--steps", "10"]
    env = launch.environment(folder)
    subprocess.run([sys.executable, *words, "--json", str(report)], env=env, check=True)
    found = json.loads(report.read_text())
    assert found["backend"] == "nccl" and found["collectives"]["all_reduce"][0]["busbw_gb_s"] > 1
    said = subprocess.run([sys.executable, "-m", "finetune.doctor"], env=env, capture_output=True, text=True)
    assert hardware.topology_line(machine) in said.stdout, said.stdout + said.stderr  # whatever else is found there


@pytest.mark.multigpu
def test_what_one_gpu_sends_to_another_arrives() -> None:
    """`python -m pytest -m multigpu tests/gpu` on two GPUs: every byte, in both directions; a changed one is found."""
    import torch

    from finetune.doctor import copies

    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    found = copies.compare(devices)
    assert len(found) == len(devices) * (len(devices) - 1)
    assert [one for one in found if one.wrong != 0] == []

    def lossy(source: str, target: str, sent: torch.Tensor) -> torch.Tensor:
        received = copies.through_torch(source, target, sent)
        received[-1] ^= 255
        return received

    assert {one.wrong for one in copies.compare(devices, lossy)} == {1}


@pytest.mark.gpu
def test_memory_is_taken_in_segments_that_grow(tmp_path: Path) -> None:
    """`python -m pytest -m gpu tests/gpu` on one GPU: what torch's allocator says of itself after the start-up."""
    script = (
        "from finetune.runtime import bootstrap; bootstrap.start(); import torch; torch.ones(1, device='cuda');"
        "print('RESULT', torch.cuda.memory._snapshot()['allocator_settings']['expandable_segments'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=launch.environment(tmp_path), capture_output=True, text=True, check=True
    )
    assert "RESULT True" in done.stdout


@pytest.mark.multigpu
def test_full_training_on_packs_begins_on_two_gpus(folder: Path) -> None:
    """`python -m pytest -m multigpu tests/gpu` on two GPUs: without `unsloth_packed_probe_in_checkpoint` and
    `unsloth_full_checkpointing` the first step never ends (D6, D7)."""
    extra = ["--model.full_finetuning", "true", "--training.learning_rate", "2e-5", "--data.packing"]
    extra += ["--data.max_length", "128", "--data.pack_length", "256", "--training.per_device_train_batch_size", "1"]
    extra += ["--training.max_steps", "4", "--training.global_batch_size", "4", "--logging.generate_samples", "0"]
    runs = [launch.train(how, arguments(folder, *extra), out=folder / how, cache=folder) for how in PROFILES]
    assert [run["backend"] for run in runs] == ["unsloth", "unsloth"]
    assert runs[0]["losses"] == pytest.approx(runs[1]["losses"], rel=1e-3)


def of_each_rank(text: str, folder: Path, **switches: str) -> list[float]:
    """What two ranks of a script print: MiB."""
    script = folder / "script.py"
    script.write_text(text)
    done = launch.run("torchrun", [], cache=folder, script=script, **switches)
    assert done.returncode == 0, done.stdout[-4000:]
    return [float(line.split()[2]) for line in done.stdout.splitlines() if line.startswith("RESULT")]


@pytest.mark.multigpu
def test_first_buckets_are_gone_in_the_second_step(tmp_path: Path) -> None:
    """`python -m pytest -m multigpu tests/gpu` on two GPUs: D8. What torch does by itself depends on who is ahead, and
    is only printed."""
    found = {away: of_each_rank(BUCKETS, tmp_path, AWAY=away) for away in ("0", "1")}
    sys.stdout.write(f"MiB over the third step, as torch does it: {found['0']}; put away: {found['1']}\n")
    assert len(found["1"]) == 2 and max(found["1"]) < 1


@pytest.mark.multigpu
def test_gradients_are_held_once(tmp_path: Path) -> None:
    """`python -m pytest -m multigpu tests/gpu` on two GPUs: D9, room for 1 GiB of gradients in place of two."""
    found = {kept: of_each_rank(HELD, tmp_path, KEPT=kept) for kept in ("0", "1")}
    assert len(found["0"]) == len(found["1"]) == 2
    for twice, once in zip(found["0"], found["1"], strict=True):
        assert 1000 < twice - once < 1100, found


@pytest.mark.multigpu
def test_full_training_on_two_gpus_needs_the_memory_of_one(tmp_path: Path) -> None:
    """`python -m pytest -m multigpu tests/gpu` on two GPUs: D8 and D9, over a whole run under accumulation."""
    model = tiny.make_model(tmp_path / "model", hidden=1024, layers=8)
    tiny.make_rows(tmp_path / "train.jsonl", 1200, longest=150)
    extra = ["--model.full_finetuning", "true", "--training.learning_rate", "2e-5", "--data.packing"]
    extra += ["--data.max_length", "512", "--data.pack_length", "16384", "--training.per_device_train_batch_size", "1"]
    extra += ["--training.max_steps", "3", "--training.global_batch_size", "4", "--logging.generate_samples", "0"]
    runs = [launch.train(how, arguments(tmp_path, *extra), out=tmp_path / how, cache=tmp_path) for how in PROFILES]
    one, two = (run["peak_memory_gib"] for run in runs)
    gradients = (model / "model.safetensors").stat().st_size / 2 / 2**30  # float32 there, bfloat16 here
    sys.stdout.write(f"GiB of one GPU {one}, of two {two}, of gradients {gradients:.3f}\n")
    assert len(two) == 2 and max(two) < one[0] + gradients / 4
