"""Updates of trained weights that are not lost to rounding, compared with plain AdamW on float32 weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetune import train
from finetune.config import Config
from finetune.config.schema import ModelConfig, TrainingConfig
from finetune.engine.optimizer import master_weights
from finetune.errors import UserError
from tests.helpers import tiny
from tests.helpers.runs import Runs, in_this_process

RATE = 2e-5


def config(full: bool = True, **training: Any) -> Config:
    return Config(model=ModelConfig(model_name_or_path="m", full_finetuning=full), training=TrainingConfig(**training))


def on_gpu(monkeypatch: pytest.MonkeyPatch, *, memory: list[float | None], parameters: int | None) -> Any:
    """A stack of ranks with GPUs of so many GiB, and a model of so many parameters."""
    monkeypatch.setattr(master_weights.distributed, "gather_objects", lambda own: memory)
    monkeypatch.setattr(master_weights.hardware, "probe", lambda: SimpleNamespace(memory_gib=memory[0]))
    monkeypatch.setattr(master_weights, "count_parameters", lambda config: parameters)
    return SimpleNamespace(device="cuda")


BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao compiles its step, which takes seconds; the operations are the same."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.mark.parametrize(
    ("memory", "billions", "optimizer", "kind"),
    [
        ([80.0], 1.2, "adamw_torch_fused", "float32"),  # 18 bytes per weight
        ([80.0], 3.7, "adamw_torch_fused", "float32"),
        ([80.0], 4.2, "adamw_torch_fused", "stochastic"),
        ([80.0] * 8, 8.0, "adamw_torch", "stochastic"),  # whatever the number of GPUs
        ([80.0, 24.0], 1.2, "adamw_torch", "float32"),
        ([80.0, 24.0], 1.3, "adamw_torch", "stochastic"),  # the smallest decides
        ([80.0], 5.5, "adamw_torch_8bit", "float32"),  # 12 bytes per weight
        ([80.0], 6.2, "adamw_torch_8bit", "stochastic"),
    ],
)
def test_auto_is_float32_if_it_fits_the_smallest_gpu(
    monkeypatch: pytest.MonkeyPatch, memory: list[float], billions: float, optimizer: str, kind: str
) -> None:
    stack = on_gpu(monkeypatch, memory=memory, parameters=int(billions * 1e9))
    found = master_weights.choose(config(optim=optimizer), stack, BF16)
    assert found.kind == kind
    assert f"of {min(memory):.1f} GiB in float32" in found.reason


def test_auto_never_rounds_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = on_gpu(monkeypatch, memory=[80.0], parameters=8 * 10**9)
    with pytest.raises(UserError, match="lion_32bit, which cannot round stochastically.*master_weights to float32"):
        master_weights.choose(config(optim="lion_32bit"), stack, BF16)
    assert master_weights.choose(config(optim="lion_32bit", master_weights="none"), stack, BF16).kind == "none"


def test_what_needs_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = on_gpu(monkeypatch, memory=[80.0], parameters=10**12)
    assert master_weights.choose(config(), stack, torch.float32).kind == "float32"
    assert master_weights.choose(config(), stack, torch.float16).kind == "float32"
    ignored = master_weights.choose(config(master_weights="none"), stack, torch.float32)
    assert ignored.kind == "float32" and "master_weights: none does not apply" in ignored.reason
    assert master_weights.choose(config(full=False), stack, BF16).kind == "float32"
    assert master_weights.choose(config(), SimpleNamespace(device="cpu"), BF16).kind == "float32"  # type: ignore[arg-type]
    stack = on_gpu(monkeypatch, memory=[80.0], parameters=None)
    assert "not known" in master_weights.choose(config(), stack, BF16).reason


def test_parameters_are_counted_without_weights(tmp_path: Path) -> None:
    tiny.make_model(tmp_path, hidden=32, layers=2)
    expected = sum(one.numel() for one in load_file(tmp_path / "model.safetensors").values())
    given = Config(model=ModelConfig(model_name_or_path=str(tmp_path)))
    (tmp_path / "model.safetensors").unlink()
    assert master_weights.count_parameters(given) == expected
    (tmp_path / "config.json").write_text("{}")
    assert master_weights.count_parameters(given) is None


# --- widening ---------------------------------------------------------------------------------------------------------


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.frozen = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 8)
        self.to(BF16)
        self.frozen.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.norm(self.embed(ids))
        return hidden, self.head(self.frozen(hidden))


def test_trained_weights_are_widened_and_activations_stay_16_bit() -> None:
    """Modules that PEFT trains whole (`modules_to_save`) keep the dtype of the model; autocast alone would return
    float32 from embeddings and norms."""
    model = Small()
    master_weights.widen(model, "none", full=False)
    assert {one.dtype for one in model.parameters()} == {BF16}
    master_weights.widen(model, "float32", full=False)
    assert {name for name, one in model.named_parameters() if one.dtype == BF16} == {"frozen.weight", "frozen.bias"}
    with torch.autocast("cpu", BF16):
        hidden, logits = model(torch.arange(3))
    assert hidden.dtype == logits.dtype == BF16
    with torch.no_grad():
        model.frozen.float()
        assert model(torch.arange(3))[0].dtype == torch.float32  # without autocast nothing changes


def test_a_norm_of_which_only_the_bias_is_trained_is_widened_as_a_whole() -> None:
    """As with `lora.bias: all`: its kernel takes weights of one dtype."""
    model = Small().requires_grad_(False)
    for module in (model.norm, model.frozen):
        module.bias.requires_grad_(True)
    master_weights.widen(model, "float32", full=False)
    kept = {name for name, one in model.named_parameters() if one.dtype == BF16}
    assert kept == {"embed.weight", "frozen.weight", "head.weight", "head.bias"}
    with torch.autocast("cpu", BF16):
        hidden, logits = model(torch.arange(3))
    assert hidden.dtype == logits.dtype == BF16
    logits.sum().backward()
    assert model.norm.weight.grad is None and model.norm.bias.grad is not None


def test_tied_weights_stay_one_tensor_in_the_saved_model() -> None:
    model = Small().float()
    model.head.weight = model.embed.weight
    state = master_weights.saved_state(model, BF16)
    assert state["head.weight"] is state["embed.weight"] and state["norm.weight"] is not state["norm.bias"]
    assert {one.dtype for one in state.values()} == {BF16}


@pytest.mark.campaign
def test_the_dry_run_of_full_fine_tuning_reloads_what_it_trains(runs: Runs, tmp_path: Path) -> None:
    given = ("--model.model_name_or_path", str(runs.folder / "model"), "--model.backend", "transformers", "--dry-run")
    files = ("--data.train_file", str(runs.folder / "train.jsonl"), "--training.output_dir", str(tmp_path / "out"))
    assert train.main([*given, *files, *FULL, "--json", str(tmp_path / "dry.json")]) == 0
    found = json.loads((tmp_path / "dry.json").read_text())
    assert found["go"], found["reason"]
    assert found["master_weights"] == {"kind": "float32", "reason": "on a CPU"}


# --- rounding ---------------------------------------------------------------------------------------------------------


def gradients(step: int, like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(step)) + 0.5


def rounded(weight: torch.Tensor, seed: int = 1) -> tuple[Any, torch.nn.Parameter]:
    settings = {"lr": RATE, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "fused": True}
    kind, settings = master_weights.rounding_optimizer(torch.optim.AdamW, settings)
    parameter = torch.nn.Parameter(weight.to(BF16))
    optimizer = kind([parameter], **settings)
    steps = iter(range(10**6))
    master_weights.seed_rounding(optimizer, seed, lambda: next(steps))
    return optimizer, parameter


def test_stochastic_rounding_follows_float32_and_rounding_to_nearest_stands_still() -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).to(BF16).float()
    exact, nearest = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(weight.to(BF16))
    optimizer, parameter = rounded(weight)
    plain = [torch.optim.AdamW([one], lr=RATE, weight_decay=0.0) for one in (exact, nearest)]
    for step in range(60):
        for one in (exact, nearest, parameter):
            one.grad = gradients(step, weight).to(one.dtype)
        for each in (*plain, optimizer):
            each.step()
    change = exact.detach() - weight
    scale = float(change.norm() ** 2)
    follows = [
        float((one.detach().float() - weight).flatten() @ change.flatten()) / scale for one in (parameter, nearest)
    ]
    assert follows[0] == pytest.approx(1, abs=0.05)  # the expected value moves as float32 does
    assert follows[1] < 0.3
    state = optimizer.state[parameter]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    reference = plain[0].state[exact]["exp_avg_sq"]
    assert torch.allclose(state["exp_avg_sq"], reference, rtol=2e-2, atol=1e-6)


def test_rounding_depends_on_seed_and_step_alone() -> None:
    """Ranks of DDP stay equal although their dropout draws other numbers, and dropout draws what it would draw."""
    weight = torch.randn(8, 512, generator=torch.Generator().manual_seed(0))
    results, drawn = [], []
    for seed, draws in ((1, 0), (1, 3), (2, 0)):
        torch.manual_seed(5)
        torch.rand(draws)
        before = torch.get_rng_state()
        optimizer, parameter = rounded(weight, seed)
        for step in range(3):
            parameter.grad = gradients(step, weight).to(BF16)
            optimizer.step()
        results.append(parameter.detach().clone())
        drawn.append(torch.equal(torch.get_rng_state(), before))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    assert drawn == [True] * 3


def test_states_stay_float32_when_they_are_loaded() -> None:
    weight = torch.randn(4, 8)
    optimizer, parameter = rounded(weight)
    parameter.grad = gradients(0, weight).to(BF16)
    optimizer.step()
    other, loaded = rounded(weight)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = RATE  # a number, as in the files of a sharded checkpoint
    other.load_state_dict(saved)
    assert torch.is_tensor(other.param_groups[0]["lr"])
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(other.state[loaded][name], optimizer.state[parameter][name])
        assert other.state[loaded][name].dtype == torch.float32


# --- the share that a step left unchanged -----------------------------------------------------------------------------


def test_unchanged_weights_are_counted_where_there_is_a_gradient() -> None:
    one, frozen = torch.nn.Parameter(torch.ones(6)), torch.nn.Parameter(torch.ones(3), requires_grad=False)
    one.grad = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 0.0])
    sample = master_weights.WeightSample([one, frozen])
    with torch.no_grad():
        one[0] += 1
    found = sample.unchanged()
    assert found is not None and found.tolist() == [3, 4]
    assert master_weights.WeightSample([frozen]).unchanged() is None


def test_large_tensors_are_sampled() -> None:
    large = torch.nn.Parameter(torch.zeros(100, 1000))
    large.grad = torch.ones_like(large)
    found = master_weights.WeightSample([large]).unchanged()
    assert found is not None and found[0] == found[1] and 10_000 < found[1] <= 2**14


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    tiny.make_model(folder / "model", hidden=32, layers=1)
    tiny.make_rows(folder / "train.jsonl", 40)
    return folder


FULL = (
    *("--model.full_finetuning", "true", "--model.dtype", "bfloat16", "--training.learning_rate", "2e-5"),
    *("--training.optim", "adamw_torch", "--training.save_steps", "3", "--logging.logging_steps", "2"),
)


@pytest.fixture
def runs(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    with in_this_process(monkeypatch, shared):
        yield Runs(shared, monkeypatch)


@pytest.mark.parametrize("weights", ["auto", "stochastic"])
def test_a_run_learns_and_resumes_exactly(runs: Runs, tmp_path: Path, weights: str) -> None:
    how = (*FULL, "--training.master_weights", weights, "--training.max_steps", "6")
    whole = runs(tmp_path / "whole", *how)
    kind = "float32" if weights == "auto" else weights
    assert whole["master_weights"]["kind"] == whole["config"]["training"]["master_weights"] == kind
    saved = load_file(tmp_path / "whole" / "model.safetensors")
    assert {one.dtype for one in saved.values()} == {BF16}
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["dtype"] == "bfloat16"
    kept = load_file(tmp_path / "whole" / "checkpoint-3" / "model.safetensors")
    assert {one.dtype for one in kept.values()} == {torch.float32 if weights == "auto" else BF16}

    runs(tmp_path / "part", *how)
    shutil.rmtree(tmp_path / "part" / "checkpoint-6")
    (tmp_path / "part" / "model.safetensors").unlink()
    again = runs(tmp_path / "part", *how, "--training.resume_from_checkpoint", "true")
    assert again["resumed_from"].endswith("checkpoint-3") and again["losses"] == whole["losses"][3:]
    for name, one in load_file(tmp_path / "part" / "model.safetensors").items():
        assert torch.equal(one, saved[name]), name


def test_a_resumed_run_keeps_what_was_decided(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = (*FULL, "--training.max_steps", "6")
    runs(tmp_path / "out", *how, "--training.master_weights", "none")
    assert "trained weights have 16 bits and are rounded to nearest" in " ".join(capsys.readouterr().out.split())
    shutil.rmtree(tmp_path / "out" / "checkpoint-6")
    (tmp_path / "out" / "model.safetensors").unlink()
    resume = ("--training.resume_from_checkpoint", "true")
    runs(tmp_path / "out", *how, *resume, "--training.master_weights", "float32", code=2)
    assert 'training.master_weights: was "none", now "float32"' in " ".join(capsys.readouterr().err.split())
    again = runs(tmp_path / "out", *how, *resume)
    assert again["master_weights"] == {"kind": "none", "reason": "as in the checkpoint"}


def test_the_share_of_unchanged_weights_tells_lost_updates(runs: Runs, tmp_path: Path) -> None:
    from finetune.review import run as review_runs
    from finetune.review.rules import learning

    shares = {}
    for weights in ("float32", "none"):
        runs(tmp_path / weights, *FULL, "--training.max_steps", "6", "--training.master_weights", weights)
        shares[weights] = learning.unchanged(review_runs.read(tmp_path / weights))
    assert shares["float32"] is not None and shares["float32"] < 0.01
    assert shares["none"] is not None and shares["none"] > learning.UNCHANGED
