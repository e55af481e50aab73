"""The patch of a trial inside a checkpointed layer: on a fixture of the defect, and on the installed Unsloth."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import CheckpointError, checkpoint

from patches import core
from patches import unsloth_packed_probe_in_checkpoint as patch
from tests.helpers import launch

INSTALLED = """
import sys
import torch, unsloth
from patches import core, unsloth_packed_probe_in_checkpoint as patch

print("LEFT OUT", patch.needed(), patch.MODULE in sys.modules)  # it would take seconds
import unsloth.utils.flash_impl, unsloth.utils.hf_packed_attention as packed


class OnThisCpu:
    def __getattr__(self, name):
        return getattr(torch, name)

    def device(self, *place):
        return torch.device("cpu")


print("CPU", patch.needed())
packed.torch, packed._torch_varlen = OnThisCpu(), lambda device: True
unsloth.utils.flash_impl.flash_impl_allows = lambda *given: True
packed._flash_varlen = lambda query, key, value, *rest: query * key * value
verdicts = core.run([patch])
takes = packed._varlen_in_graph_probe(0, torch.float32, 8, 2, 2, None)
print("FOUND", [one.applied for one in verdicts], patch.needed(), takes)
"""


def trial(device: int, dtype: torch.dtype, width: int, heads: int, kv_heads: int, window: int | None) -> bool:
    """As the releases that have the defect do it, on a CPU."""
    query = torch.zeros(1, heads, 16, width, requires_grad=True)
    (query * query).sum().backward()
    return True


@pytest.fixture
def unsloth(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    for name in ("unsloth", "unsloth.utils", patch.MODULE):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    module = sys.modules[patch.MODULE]
    module.__dict__[patch.NAME] = trial
    return module


def layer_of(unsloth: types.ModuleType, weight: torch.Tensor) -> tuple[Callable[[torch.Tensor], torch.Tensor], list]:
    """A layer whose first call tries the kernel and remembers the answer, and the list of its calls."""
    calls: list[bool] = []
    answers: dict[str, bool] = {}

    def layer(given: torch.Tensor) -> torch.Tensor:
        calls.append(True)
        wave = (given * weight).sin()
        if not answers:
            answers["takes"] = vars(unsloth)[patch.NAME](0, torch.float32, 8, 2, 2, None)
        return wave * wave

    return layer, calls


def test_a_layer_is_computed_again_in_the_backward_alone(unsloth: types.ModuleType) -> None:
    """On a CPU the defect ends in an error: one thread does all the work, so nothing waits for another."""
    given, weight = torch.tensor([0.1, 0.2]), torch.tensor([1.0, 2.0], requires_grad=True)
    layer, calls = layer_of(unsloth, weight)
    found = checkpoint(layer, given, use_reentrant=False)
    assert len(calls) == 2  # in the middle of the forward
    with pytest.raises(CheckpointError, match="different number of tensors"):
        found.sum().backward()

    assert [verdict.applied for verdict in core.run([patch])] == [True]
    weight.grad = None
    layer, calls = layer_of(unsloth, weight)
    found = checkpoint(layer, given, use_reentrant=False)
    assert len(calls) == 1
    found.sum().backward()
    assert len(calls) == 2
    (expected,) = torch.autograd.grad((given * weight).sin().square().sum(), weight)
    assert torch.equal(weight.grad, expected)
    assert [verdict.applied for verdict in core.run([patch])] == [False]


def test_nothing_is_looked_at_without_unsloth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "unsloth", raising=False)
    assert not patch.needed()


def test_a_release_without_the_trial(unsloth: types.ModuleType) -> None:
    del unsloth.__dict__[patch.NAME]
    assert not patch.needed()


@pytest.mark.unsloth
@pytest.mark.process
def test_the_installed_unsloth(tmp_path: Path) -> None:
    """Its trial, with a CPU in place of the GPU and a product in place of the kernel, has the defect, which is gone
    with the patch. Once a release is repaired, this says when to remove it."""
    done = launch.on_the_installed_unsloth(INSTALLED, tmp_path)
    found = [line for line in done.stdout.splitlines() if line.startswith(("LEFT OUT", "CPU", "FOUND"))]
    assert found == ["LEFT OUT False False", "CPU False", "FOUND [True] False True"], done.stderr[-4000:]
