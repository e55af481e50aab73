"""The contract of a patch, and that the list of patches is true."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import patches
from benchmarks import release_probes
from patches import core

FOLDER = Path(patches.__file__).parent
ALL = patches.ALL


def test_every_file_is_listed_once() -> None:
    files = {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "core"}
    listed = [patch.__name__.rpartition(".")[2] for patch in ALL]
    assert sorted(listed) == sorted(files)


@pytest.mark.parametrize("patch", ALL, ids=lambda patch: patch.__name__)
def test_patch_says_what_it_is_for(patch: types.ModuleType) -> None:
    assert "Without this:" in (patch.__doc__ or "")
    assert patch.UPSTREAM.startswith("https://")
    if patch.REMOVE_WHEN is not None:
        Requirement(patch.REMOVE_WHEN)


@pytest.mark.parametrize("patch", ALL, ids=lambda patch: patch.__name__)
def test_patch_is_removed_when_its_time_has_come(patch: types.ModuleType) -> None:
    """Fails when the oldest version that the project allows no longer has the defect."""
    if patch.REMOVE_WHEN is None:
        return
    gone = Requirement(patch.REMOVE_WHEN)
    text = (FOLDER.parent / "pyproject.toml").read_text()
    lower = [line.strip(' ",') for line in text.splitlines() if line.strip().startswith(f'"{gone.name}>=')]
    assert lower, f"{gone.name} is no dependency"
    oldest = lower[0].split(">=")[1].split(",")[0]
    assert not gone.specifier.contains(oldest), f"delete {patch.__file__}: every {gone.name} allowed is repaired"


def test_patches_that_a_new_unsloth_makes_superfluous_are_named() -> None:
    """One whose REMOVE_WHEN names a release already is not."""
    probes = {"unsloth_fused_loss_view": {"present": False}, "torch_cudnn_attention_nan": {"present": False}}
    probes |= {"unsloth_full_checkpointing": {"present": True}, "unsloth_rope_gradient_layout": {"unknown": "no GPU"}}
    given = {"unsloth": "2099.1.1", "transformers": "5.30.0", "trl": "1.20.0", "import_error": None, "probes": probes}
    first, *others, last = release_probes.summary(given).splitlines()
    assert first == "unsloth 2099.1.1 with transformers 5.30.0 and trl 1.20.0:"
    assert others == ["  unsloth_full_checkpointing: still needed", "  unsloth_rope_gradient_layout: no GPU"]
    assert last.startswith("  torch_cudnn_attention_nan: superfluous; set REMOVE_WHEN in patches/torch_cudnn_")


@pytest.mark.parametrize("patch", ALL, ids=lambda patch: patch.__name__)
def test_applying_twice_is_a_no_op(patch: types.ModuleType) -> None:
    patch.apply()
    assert not patch.needed()
    patch.apply()
    assert not patch.needed()


def module(**members: object) -> types.ModuleType:
    made = types.ModuleType("patches.made_up")
    made.__dict__.update({"UPSTREAM": "https://example.org", **members})
    return made


def test_core_skips_applies_and_checks() -> None:
    state = {"broken": True, "applied": 0}

    def apply() -> None:
        state["broken"] = False
        state["applied"] += 1

    broken = module(needed=lambda: state["broken"], apply=apply)
    first, second = core.run([broken])[0], core.run([broken])[0]
    assert (first.needed, first.applied, second.needed, second.applied) == (True, True, False, False)
    assert state["applied"] == 1


def test_a_patch_that_is_left_out_is_recorded_and_not_applied() -> None:
    def fail() -> None:
        raise AssertionError("a patch that was left out ran")

    broken, unknown = module(needed=lambda: True, apply=fail), module(needed=lambda: 1 / 0, apply=fail)
    expected = {"name": "made_up", "applied": False, "reason": "left out"}
    assert core.run([broken], ["made_up"])[0].to_dict() == expected | {"needed": True}
    assert core.run([broken], ["all"])[0].to_dict() == expected | {"needed": True}
    assert core.run([unknown], ["made_up"])[0].to_dict() == expected | {"needed": None}


def test_core_stops_on_a_patch_that_does_not_help_and_on_a_probe_that_fails() -> None:
    with pytest.raises(RuntimeError, match="still present"):
        core.run([module(needed=lambda: True, apply=lambda: None)])
    with pytest.raises(RuntimeError, match="its probe failed"):
        core.run([module(needed=lambda: 1 / 0, apply=lambda: None)])


def test_varlen_attention_as_torch_2_11_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function with windows and without `enable_gqa`: the probe sees it, the patch forwards all but that keyword."""
    import torch
    from torch.nn.attention import varlen

    from patches import torch_varlen_gqa as patch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seen = {}

    def old(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1), scale=None):
        seen.update(query=query, window_size=window_size)
        return "result"

    monkeypatch.setattr(varlen, "varlen_attn", old)
    assert patch.needed()
    patch.apply()
    assert not patch.needed()
    assert varlen.varlen_attn(1, 2, 3, 4, 5, 6, 7, window_size=(0, 1), enable_gqa=True) == "result"
    assert seen == {"query": 1, "window_size": (0, 1)}


def test_cudnn_attention_as_torch_2_11_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward pass that overflows where cuDNN is allowed: the probe sees it, and the patch allows cuDNN no more."""
    import torch

    from patches import torch_cudnn_attention_nan as patch

    real = torch.nn.functional.scaled_dot_product_attention

    def attention(query, key, value, attn_mask):
        query = query.clone()
        if torch.backends.cuda.cudnn_sdp_enabled():
            query.register_hook(lambda gradient: gradient * float("nan"))
        return real(query, key, value, attn_mask=attn_mask)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(patch, "DEVICE", "cpu")
    assert not patch.needed()  # the CPU's attention is right
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        assert patch.needed()
        patch.apply()
        assert not patch.needed() and not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
