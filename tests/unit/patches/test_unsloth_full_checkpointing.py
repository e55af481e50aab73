"""The patch of full fine-tuning's checkpointing on several ranks: on the installed Unsloth, and on other releases."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from patches import core
from patches import unsloth_full_checkpointing as patch
from tests.helpers import launch

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
@pytest.mark.campaign
@pytest.mark.process
def test_the_installed_unsloth(tmp_path: Path) -> None:
    """On one rank and on two: with the patch a Llama is checkpointed on two as on one, to the same gradients, and a
    model that Unsloth has no code of its own for as before. Once a release does so itself, this says when to remove
    the patch."""
    done = launch.on_the_installed_unsloth(INSTALLED, tmp_path)
    found = next((line for line in done.stdout.splitlines() if line.startswith("FOUND")), done.stderr[-4000:])
    before, after, others = (REENTRANT, OTHER), (REENTRANT, REENTRANT), [REENTRANT, OTHER]
    assert found == f"FOUND [True] False {before} {after} {others} True", found


# The decision as the releases up to 2026.10.7 take it, and as later ones do.
DECISIONS = {
    "2026.10.7": "not is_distributed()",
    "2026.10.9": "vlm_gradient_checkpointing_reentrant()",
}
RELEASE = """
from unsloth.models.loader_utils import *

def unpatch_unsloth_gradient_checkpointing():
    prepared.append("unpatched")

def prepare_model_for_training(model, use_reentrant=True):
    prepared.append(use_reentrant)

def post_patch_model(model, use_gradient_checkpointing=True):
    use_reentrant = DECISION
    if not use_reentrant:
        unpatch_unsloth_gradient_checkpointing()
    prepare_model_for_training(model, use_reentrant=use_reentrant)

prepared = []
FastBaseModel = type("FastBaseModel", (), {"post_patch_model": staticmethod(post_patch_model)})
"""


def stand_in(monkeypatch: pytest.MonkeyPatch, decision: str, ranks: int = 1) -> types.ModuleType:
    """Unsloth's module with this decision, in a process of so many ranks."""
    utils, vision = types.ModuleType(patch.UTILITIES), types.ModuleType(patch.MODULE)
    asked = [f"def is_distributed(): return {ranks} > 1"]
    if "vlm" in decision:
        asked.append("def vlm_gradient_checkpointing_reentrant(): return not is_distributed()")
    exec("\n".join(asked), utils.__dict__)
    for name in ("unsloth", "unsloth.models"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for module in (utils, vision):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(RELEASE.replace("DECISION", decision), vision.__dict__)
    return vision


@pytest.fixture(params=DECISIONS)
def decision(request: pytest.FixtureRequest) -> str:
    return DECISIONS[request.param]


def prepared(vision: types.ModuleType, model_type: str) -> list:
    """What `post_patch_model` did to a model of this type."""
    vision.__dict__["prepared"].clear()
    model = types.SimpleNamespace(config=types.SimpleNamespace(model_type=model_type))
    vision.__dict__["FastBaseModel"].post_patch_model(model)
    return list(vision.__dict__["prepared"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_text_models_keep_reentrant_checkpointing(decision: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    vision = stand_in(monkeypatch, decision, ranks)
    as_published = [True] if ranks == 1 else ["unpatched", False]
    assert prepared(vision, "llama") == as_published
    assert patch.needed() and prepared(vision, "llama") == as_published  # the probe changes nothing
    assert [verdict.applied for verdict in core.run([patch])] == [True]
    assert prepared(vision, "llama") == [True]
    assert prepared(vision, "gemma3") == as_published  # has a vision tower
    assert [verdict.applied for verdict in core.run([patch])] == [False]
    assert vision.__dict__["is_distributed"]() == (ranks == 2)


@pytest.mark.parametrize("fixed", ["True", "use_gradient_checkpointing or not is_distributed()"])
def test_a_release_that_is_reentrant_on_several_ranks(fixed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, fixed)
    assert not patch.needed()


def test_a_release_that_asks_another_question_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patch cannot help there, and says so: the run does not start as if it had."""
    stand_in(monkeypatch, "False")
    with pytest.raises(RuntimeError, match="applied, but the defect is still present"):
        core.run([patch])


@pytest.mark.parametrize("name", ["FastBaseModel", "is_distributed", patch.PREPARES])
def test_a_release_without_one_of_its_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    del stand_in(monkeypatch, DECISIONS["2026.10.7"]).__dict__[name]
    assert not patch.needed()


def test_nothing_is_probed_without_unsloth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, patch.MODULE, raising=False)
    assert not patch.needed()
