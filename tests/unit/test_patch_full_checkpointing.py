"""The patch of full fine-tuning's checkpointing on several ranks: on the installed Unsloth, and on other releases."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from patches import core
from patches import unsloth_full_checkpointing as patch
from tests import launch

# A reentrant checkpoint runs a layer without gradients first, and again with them in the backward.
INSTALLED = """
import os, sys, torch, unsloth
import unsloth.models.vision as vision
from transformers import LlamaConfig, LlamaForCausalLM, PhiConfig, PhiForCausalLM
from patches import core, unsloth_full_checkpointing as patch

os.environ["UNSLOTH_ENABLE_FULL_FINETUNING"] = "1"
SMALL = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)


def train(world_size, kind, config):
    os.environ.update(WORLD_SIZE=str(world_size), RANK="0", LOCAL_RANK="0")
    torch.manual_seed(0)
    model = vision.FastBaseModel.post_patch_model(kind(config(**SMALL)), True, trust_remote_code=True)
    layer, seen = model.model.layers[0].mlp, []
    layer.register_forward_pre_hook(lambda *given: seen.append(torch.is_grad_enabled()))
    tokens = torch.arange(8)[None]
    model.train()
    model(tokens, labels=tokens).loss.backward()
    return seen, [weight.grad for weight in model.parameters()]


before, expected = zip(*(train(world_size, LlamaForCausalLM, LlamaConfig) for world_size in (1, 2)))
applied = [one.applied for one in core.run([patch])]
after, found = zip(*(train(world_size, LlamaForCausalLM, LlamaConfig) for world_size in (1, 2)))
others = [train(world_size, PhiForCausalLM, PhiConfig)[0] for world_size in (1, 2)]
same = all(torch.equal(one, other) for one, other in zip(sum(expected, []), sum(found, []), strict=True))
print("FOUND", applied, patch.needed(), before, after, others, same)
"""
REENTRANT, OTHER = [False, True], [True, True]


@pytest.mark.unsloth
@pytest.mark.process
def test_the_installed_unsloth(tmp_path: Path) -> None:
    """On one rank and on two: with the patch a Llama is checkpointed on two as on one, to the same gradients, and a
    model that Unsloth has no code of its own for as before. Once a release does so itself, this says when to remove
    the patch."""
    done = launch.on_the_installed_unsloth(INSTALLED, tmp_path)
    found = next((line for line in done.stdout.splitlines() if line.startswith("FOUND")), done.stderr[-4000:])
    before, after, others = (REENTRANT, OTHER), (REENTRANT, REENTRANT), [REENTRANT, OTHER]
    assert found == f"FOUND [True] False {before} {after} {others} True", found


@pytest.fixture
def unsloth(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A release in which `is_distributed` decides, as a stand-in."""
    utils, vision = types.ModuleType("unsloth.models.loader_utils"), types.ModuleType(patch.MODULE)
    exec(f"def is_distributed(): return False\ndef {patch.ASK}(): return not is_distributed()", utils.__dict__)
    vision.__dict__[patch.ASK] = vars(utils)[patch.ASK]
    vision.__dict__["FastBaseModel"] = type("FastBaseModel", (), {"post_patch_model": staticmethod(lambda model: None)})
    for module in (utils, vision):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return vision


def test_it_is_applied_once(unsloth: types.ModuleType) -> None:
    assert [verdict.applied for verdict in core.run([patch])] == [True]
    assert [verdict.applied for verdict in core.run([patch])] == [False]


@pytest.mark.parametrize(
    ("module", "name"),
    [(patch.MODULE, patch.ASK), (patch.MODULE, "FastBaseModel"), ("unsloth.models.loader_utils", patch.DECIDES)],
)
def test_a_release_without_one_of_its_parts(module: str, name: str, unsloth: types.ModuleType) -> None:
    del sys.modules[module].__dict__[name]
    assert not patch.needed()


def test_a_release_that_is_reentrant_on_several(unsloth: types.ModuleType) -> None:
    exec(f"def {patch.ASK}(): return True", sys.modules["unsloth.models.loader_utils"].__dict__)
    unsloth.__dict__[patch.ASK] = vars(sys.modules["unsloth.models.loader_utils"])[patch.ASK]
    assert not patch.needed()


def test_nothing_is_looked_at_without_unsloth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, patch.MODULE, raising=False)
    assert not patch.needed()
