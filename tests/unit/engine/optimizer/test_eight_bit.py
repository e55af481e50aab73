"""Adam's states in 8 bits: codes that do not change, files, what is held, and a learning rate in a tensor."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from finetune.engine.checkpoint import tensor_files
from finetune.engine.optimizer import eight_bit, state_bytes
from finetune.engine.sharding import memory_per_rank, shard
from finetune.engine.training.loss import StepStatistics
from finetune.engine.training.schedule import move_schedule, set_learning_rate
from finetune.measure import probe
from patches import torchao_state_dtype

pytest.importorskip("torchao")


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchao wrote it: compiling takes minutes on a CPU."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    torchao_state_dtype.apply()  # as `bootstrap.start` does


def state(shape: tuple[int, ...], signed: bool, seed: int = 0) -> Any:
    """A state as torchao makes it, of numbers of many sizes."""
    from torchao.optim.subclass_8bit import OptimState8bit

    torch.manual_seed(seed)
    numbers = torch.randn(shape) * torch.exp(3 * torch.randn(shape))
    made = OptimState8bit.zeros(shape, signed, 256, torch.device("cpu"))
    made.copy_(numbers if signed else numbers.square())
    return made


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_numbers_that_were_in_codes_become_the_same_codes(name: str) -> None:
    """torchao's own `copy_` makes other ones of a block whose largest number is negative."""
    before = state((64, 256), name == "exp_avg")
    after: Any = eight_bit.encode(before.dequantize(), name)
    assert torch.equal(after.codes, before.codes)
    assert torch.allclose(after.scale, before.scale, rtol=1e-6)
    assert torch.allclose(after.dequantize(), before.dequantize(), rtol=1e-6, atol=0)
    assert eight_bit.encode(before, name) is before


def test_new_blocks_are_as_close_to_the_numbers_as_torchaos() -> None:
    numbers = torch.randn(16, 256)
    ours, theirs = eight_bit.encode(numbers, "exp_avg"), state((16, 256), True)
    theirs.copy_(numbers)
    error, allowed = ((one.dequantize() - numbers).abs().mean() for one in (ours, theirs))  # type: ignore[operator]
    assert error <= allowed * 1.02


def test_small_parts_and_broken_blocks_stay_numbers() -> None:
    for shape in ((15, 256), (17, 255)):
        assert isinstance(eight_bit.encode(torch.ones(shape), "exp_avg"), torch.Tensor)
        assert not hasattr(eight_bit.encode(torch.ones(shape), "exp_avg"), "codes")
    small = eight_bit.encode(eight_bit.slice_rows(state((32, 256), True), 0, 8), "exp_avg")
    assert torch.equal(small, state((32, 256), True).dequantize()[:8])


class Layers(nn.Module):
    """Rows of 256 numbers, rows that are no whole blocks, a small one, and one whose rows are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks, self.odd, self.small = nn.Linear(256, 32, bias=False), nn.Linear(32, 128), nn.Linear(128, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(self.odd(self.blocks(x)))


def trained(model: nn.Module, steps: int, optimizer: Any = None) -> Any:
    """The optimizer after some steps."""
    from torchao.optim import AdamW8bit

    optimizer = optimizer or AdamW8bit(model.parameters(), lr=1e-2)
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, 256, dtype=next(model.parameters()).dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_come_back_from_the_files_of_a_sharded_checkpoint(tmp_path: Path, dtype: torch.dtype) -> None:
    """In codes or numbers, sharded or whole, as the same states, which train on alike."""
    model = Layers().to(dtype)
    fully_shard(model, mesh=shard.mesh("cpu"))
    optimizer = trained(model, 3)
    assert eight_bit.is_used(optimizer) and eight_bit.is_used(SimpleNamespace(optimizer=optimizer))
    tensor_files.write_optimizer(tmp_path, optimizer)
    names = set(tensor_files.TensorFiles(tmp_path, "optimizer").keys())
    assert {"0.exp_avg.codes", "0.exp_avg.scales", "1.exp_avg", "2.exp_avg_sq", "4.exp_avg"} <= names
    assert "1.exp_avg.codes" not in names  # its rows of 32 numbers would tie the blocks to the number of ranks

    whole = Layers().to(dtype)
    whole.load_state_dict({name: shard.gather_full(one).clone() for name, one in model.state_dict().items()})
    read = tensor_files.read_optimizer(tmp_path, list(whole.parameters()), in_codes=True)
    other = trained(whole, 0)
    other.load_state_dict(read)
    for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            own = one[name].to_local()
            assert hasattr(own, "codes") == hasattr(two[name], "codes")
            assert torch.allclose(eight_bit.decode(own), eight_bit.decode(two[name]), rtol=1e-6, atol=0)
    trained(model, 2, optimizer), trained(whole, 2, other)
    for name, one in whole.state_dict().items():
        assert torch.allclose(
            one, shard.gather_full(model.state_dict()[name]), atol=1e-6 if dtype == torch.float32 else 1e-3
        )


@pytest.mark.usefixtures("one_rank_group")
def test_whole_states_are_split_over_the_ranks() -> None:
    """As from a DDP run's optimizer.pt."""
    plain, split = Layers(), Layers()
    optimizer = trained(plain, 3)
    fully_shard(split, mesh=shard.mesh("cpu"))
    state = tensor_files.split_optimizer(optimizer.state_dict(), list(split.parameters()), in_codes=True)
    for index, one in enumerate(optimizer.state.values()):
        part = state["state"][index]["exp_avg"]
        assert isinstance(part, DTensor)
        assert torch.allclose(eight_bit.decode(part.to_local()), eight_bit.decode(one["exp_avg"]), rtol=1e-6, atol=0)
    other = trained(split, 0)
    other.load_state_dict(state)
    assert torch.is_tensor(other.param_groups[0]["lr"])


def test_what_a_rank_holds_of_them_is_predicted() -> None:
    model = Layers()
    optimizer = trained(model, 1)
    found = memory_per_rank.allocated_bytes(model, optimizer)
    assert found.optimizer == memory_per_rank.predicted_bytes(model, 1, "adamw_torch_8bit").optimizer
    numbers = 2 * (256 * 32 + 32 * 128)
    assert numbers < (found.optimizer or 0) < 2 * numbers  # not 8 bytes each
    half = memory_per_rank.predicted_bytes(model, 2, "adamw_torch_8bit")
    # Of 16 x 256 and 64 x 32 numbers; the second ones are too few for codes, in both states.
    assert half.optimizer == 2 * (4096 + 64 + 1024) + 2 * 4 * (2048 + 64 + 128 + 1)


def test_bytes_of_a_part_and_of_a_weight() -> None:
    assert state_bytes.optimizer_state_bytes("adamw_torch_8bit", 2**20, 2) == 2 * (2**20 + 2**20 // 64 + 1024)
    assert state_bytes.optimizer_state_bytes("adamw_torch", 2**20, 2) == 2**22
    assert state_bytes.optimizer_state_bytes("unknown", 2**20, 2) is None
    assert state_bytes.state_bytes_per_weight("adamw_torch_8bit", 2) == pytest.approx(2.03125)
    assert (state_bytes.state_bytes_per_weight("adamw_torch", 2), state_bytes.state_bytes_per_weight("sgd", 2)) == (
        4,
        0,
    )


def test_a_learning_rate_in_a_tensor_is_set_in_place() -> None:
    """torchao's optimizers refuse a number in its place."""
    model = Layers()
    optimizer = trained(model, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    move_schedule(schedule, 3)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(1e-2 / 4)
    set_learning_rate(optimizer.param_groups[0], 0.0)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    trained(model, 1, optimizer)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    group = {"lr": 1.0}
    set_learning_rate(group, 0.5)
    assert group["lr"] == 0.5


def test_the_dry_run_tries_whether_its_state_fits() -> None:
    """Without changing a weight, and counts what it holds."""
    model = Layers()
    optimizer = trained(model, 0)
    trainer: Any = SimpleNamespace(model=model, optimizer=optimizer, statistics=StepStatistics())
    before = {name: one.clone() for name, one in model.state_dict().items()}
    assert probe.training_state_fits(trainer)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    expected = memory_per_rank.predicted_bytes(model, 1, "adamw_torch_8bit").optimizer
    assert memory_per_rank.allocated_bytes(model, optimizer).optimizer == expected
