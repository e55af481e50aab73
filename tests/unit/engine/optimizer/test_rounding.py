"""Rounding of trained weights to 16 bits: small updates survive, and nothing but the tensor's name decides how."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from finetune.engine.checkpoint import tensor_files
from finetune.engine.optimizer import master_weights, rounding

WEIGHT = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
UPDATE = 1e-3 * torch.randn(256, 128, generator=torch.Generator().manual_seed(1)) * WEIGHT.abs()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_updates_are_kept_and_numbers_of_16_bits_stay(dtype: torch.dtype) -> None:
    old = WEIGHT.to(dtype).float()
    update = UPDATE * (1 if dtype == torch.bfloat16 else 1 / 8)  # float16 is 8 times as fine
    found = rounding.round_to(old + update, dtype, "w")
    assert found.dtype == dtype

    def kept(rounded: torch.Tensor) -> float:
        return float(((rounded.float() - old) * update).sum() / (update * update).sum())

    assert kept(found) == pytest.approx(1, abs=0.1)
    assert kept((old + update).to(dtype)) < 0.2
    assert float((found.float() - old - update).mean()) == pytest.approx(0, abs=3e-5)
    lower = torch.nextafter(found, torch.full_like(found, -torch.inf)).float()
    upper = torch.nextafter(found, torch.full_like(found, torch.inf)).float()
    assert ((lower < old + update) & (old + update < upper)).all()
    assert torch.equal(rounding.round_to(old, dtype, "w").float(), old)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    assert torch.equal(rounding.round_to(special, dtype, "w").float(), special)
    assert rounding.round_to(torch.tensor([torch.nan]), dtype, "w").isnan().all()


def test_the_tensors_name_and_the_seed_decide() -> None:
    first = rounding.round_stochastically(WEIGHT, torch.bfloat16, "a")
    torch.manual_seed(7)
    assert torch.equal(rounding.round_stochastically(WEIGHT, torch.bfloat16, "a"), first)
    assert not torch.equal(rounding.round_stochastically(WEIGHT, torch.bfloat16, "b"), first)
    assert not torch.equal(rounding.round_stochastically(WEIGHT, torch.bfloat16, "a", seed=1), first)
    assert torch.equal(rounding.round_to(WEIGHT, torch.float32, "a"), WEIGHT)


def test_a_fully_trained_model_is_saved_alike_in_one_file_and_in_shards(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 16))
    state = master_weights.saved_state(model, torch.bfloat16)
    weights = {name: one.detach() for name, one in model.named_parameters()}
    dtypes = dict.fromkeys(weights, torch.bfloat16)
    for size in (1000, 10**6):
        (folder := tmp_path / str(size)).mkdir()
        tensor_files.write(folder, "model", weights, file_bytes=size, dtypes=dtypes)
        own = {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}
        assert own.keys() == state.keys() and all(torch.equal(own[name], state[name]) for name in own)
    assert len(list((tmp_path / "1000").glob("*.safetensors"))) > 1
    assert not torch.equal(state["0.weight"], weights["0.weight"].bfloat16())
