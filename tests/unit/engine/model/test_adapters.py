"""Adapters on a mixture of experts, and full fine-tuning: the first gradient of a run against a loop over single
documents in plain PyTorch, with transformers' load-balancing loss. An adapter's gradient follows from that of the
weight that it adds to: with scale s and W + s B A, the gradient of B is s G A^T for the gradient G of W."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from finetune.config import load
from finetune.parity import run as parity_run
from tests.helpers import launch, tiny
from tests.helpers.runs import give_trainer_to, in_this_process
from tests.helpers.tiny import EXPERTS
from tests.unit.engine.model.test_router_loss import COEFFICIENT, documents, reference

RANK, SCALE = 4, 3.0
ATTENTION = "[q_proj, k_proj, v_proj, o_proj]"
ROWS = [(ids, labels) for ids, labels in documents(7) if (labels != -100).any()]
assert len(ROWS) == 6


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny mixtures, each with its rows in rows.jsonl."""
    found = {}
    for family in ("Qwen3Moe", "GptOss"):  # the second has its experts transposed, with biases
        found[family] = tiny.save_moe(family, tmp_path_factory.mktemp("mixtures") / family)
        rows = ({"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in ROWS)
        (found[family] / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


@functools.cache
def plain_gradients(folder: Path) -> dict[str, torch.Tensor]:
    found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    ).train()
    reference(found, ROWS)
    return {name: one.grad for name, one in found.named_parameters()}


def check(dump: Path, folder: Path, kind: str) -> None:
    """That the gradients of a run are those of the loop, for every tensor that it trains."""
    plain = plain_gradients(folder)
    found = {name.replace(".default", ""): one for name, one in load_file(dump / "gradient.safetensors").items()}
    weights = {name.replace(".default", ""): one for name, one in load_file(dump / "weights.safetensors").items()}
    if kind == "full":
        assert found.keys() == plain.keys()
        return torch.testing.assert_close(found, plain, rtol=1e-3, atol=2e-6)
    expected: dict[str, torch.Tensor] = {}
    for name, gradient in found.items():
        path, _, side = name.removeprefix("base_model.model.").partition(".lora_")
        if side == "A.weight":
            assert not gradient.any()  # as B is zero
            continue
        a = weights[name.replace("lora_B", "lora_A")]
        path = path.replace(".base_layer", "")
        if "experts" not in path:
            expected[name] = SCALE * plain[f"{path}.weight"] @ a.T
        else:
            gate_up, down = (plain[f"{path}.{leaf}_proj"] for leaf in ("gate_up", "down"))
            whole = gate_up if ".base_layer." in name else down
            whole = whole.mT if folder.name == "GptOss" else whole  # [experts, out, in]
            expected[name] = SCALE * torch.einsum("eoi,eri->ore", whole, a.unflatten(0, (EXPERTS, RANK))).flatten(1)
    assert len(expected) == (8 if kind == "attention" else 12) and all(one.any() for one in expected.values())
    torch.testing.assert_close({name: found[name] for name in expected}, expected, rtol=1e-3, atol=2e-6)


CROSSING = [
    ("Qwen3Moe", "full", "padded", 1),
    ("Qwen3Moe", "full", "packed", 2),
    ("Qwen3Moe", "LoRA", "padded", 3),
    ("Qwen3Moe", "LoRA", "packed", 1),
    ("Qwen3Moe", "attention", "packed", 4),
    ("GptOss", "full", "padded", 6),
    ("GptOss", "LoRA", "padded", 2),
]


def words(folder: Path, kind: str, layout: str, size: int, backend: str = "transformers") -> list[str]:
    """All rows in one step, of micro-batches of `size`."""
    found = ["--model.model_name_or_path", str(folder), "--data.train_file", str(folder / "rows.jsonl")]
    found += ["--model.backend", backend, "--training.router_aux_loss_coef", str(COEFFICIENT), "--data.num_proc", "1"]
    found += ["--training.per_device_train_batch_size", str(size), "--training.weight_decay", "0"]
    found += {"full": ["--model.full_finetuning"], "LoRA": [], "attention": ["--lora.target_modules", ATTENTION]}[kind]
    found += ["--lora.r", str(RANK), "--lora.lora_alpha", str(int(RANK * SCALE))] if kind != "full" else []
    if layout == "padded":
        return [*found, "--training.global_batch_size", "6"]
    lengths = ["--data.packing", "--data.pack_length", "24", "--data.max_length", "24"]
    return [*found, *lengths, "--training.global_batch_size", "4"]


def gradients(folder: Path, out: Path, *given: Any) -> Path:
    out.mkdir()
    assert parity_run.run(load(words(folder, *given)), out, 1, []) == 0
    return out


@pytest.mark.parametrize(("family", "kind", "layout", "size"), CROSSING)
def test_a_step_has_the_gradient_of_its_documents(
    family: str,
    kind: str,
    layout: str,
    size: int,
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with in_this_process(monkeypatch, tmp_path):
        check(gradients(models[family], tmp_path / "out", kind, layout, size), models[family], kind)


def test_an_expert_without_its_adapter_is_found(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that a layer's forward pass leaves out gets no gradient."""

    def skip(trainer: Any) -> None:
        used = (torch.arange(RANK * EXPERTS) % EXPERTS != 2).float()
        for name, one in trainer.model.named_parameters():
            if "layers.1.mlp.experts.lora_B" in name:
                one.register_hook(lambda gradient: gradient * used)

    with in_this_process(monkeypatch, tmp_path):
        give_trainer_to(monkeypatch, skip)
        out = gradients(models["Qwen3Moe"], tmp_path / "out", "LoRA", "padded", 6)
    with pytest.raises(AssertionError, match="layers.1.mlp.experts.lora_B"):
        check(out, models["Qwen3Moe"], "LoRA")


@pytest.mark.process  # Unsloth changes the libraries of its process
@pytest.mark.unsloth
@pytest.mark.parametrize(
    ("kind", "layout", "size"), [("LoRA", "packed", 2), pytest.param("full", "padded", 3, marks=pytest.mark.campaign)]
)
def test_unsloth_has_the_gradient_of_the_documents(
    kind: str, layout: str, size: int, models: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    given = [str(out), "1", "", "ddp", "unsloth", "1", *words(models["Qwen3Moe"], kind, layout, size, "unsloth")]
    done = launch.python(["-m", "finetune.parity.run", *given], cache=tmp_path, kind="unsloth")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    check(out, models["Qwen3Moe"], kind)


@pytest.mark.campaign
@pytest.mark.process  # Unsloth changes the libraries of its process
@pytest.mark.unsloth
def test_experts_that_unsloth_packs_into_4_bits(tmp_path: Path) -> None:
    """As on GPUs, under DDP, where it computes them in bfloat16: the gradients of the adapter are those on unpacked
    weights. Each token has all experts, as rounding could change a choice."""
    families = ("Qwen3Moe", "GptOss")
    folders = [str(tiny.save_moe(one, tmp_path / one, num_experts_per_tok=EXPERTS)) for one in families]
    script = launch.SPIES / "packed_experts.py"
    done = launch.run("2 ranks", folders, cache=tmp_path, script=script, **launch.CODE_FOR_GPUS)
    found = [line.split() for line in done.stdout.splitlines() if line.startswith(str(tmp_path))]
    assert [one[:2] for one in found] == [[folder, "8"] for folder in folders], done.stdout[-3000:]
    assert all(float(one[2]) < 0.02 for one in found), found
