"""The layout of the rotary embedding's gradients, on a function of our own that has the defect, and on Unsloth's."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from patches import core
from patches import unsloth_rope_gradient_layout as patch


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [batch, heads, tokens, head_dim], turned by the angles of each token [batch, tokens, head_dim / 2]."""
    one, other = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A rotary embedding that computes and allocates as Unsloth's does, and counts its backward passes' rows."""

    class Fast_RoPE_Embedding_QK(torch.autograd.Function):  # noqa: N801
        rows: list[int] = []

        @staticmethod
        def forward(ctx, Q, K, cos, sin, rope_indices):  # noqa: N803
            ctx.cos, ctx.sin, ctx.rope_indices = cos, sin, rope_indices
            ctx.has_indices = rope_indices is not None
            return tuple(rotated(one, *angles(ctx, one)) for one in (Q, K))

        @staticmethod
        def backward(ctx, dQ, dK):  # noqa: N803
            Fast_RoPE_Embedding_QK.rows.append(len(dQ))
            found = [
                torch.empty(one.shape).copy_(rotated(one, cos, -sin))
                for one in (dQ, dK)
                for cos, sin in [angles(ctx, one)]
            ]
            return *found, None, None, None

    def angles(ctx: Any, x: torch.Tensor) -> list[torch.Tensor]:
        batch, _, tokens, _ = x.shape
        indices = torch.arange(tokens).repeat(batch) if ctx.rope_indices is None else ctx.rope_indices.flatten()
        return [table[indices].view(batch, tokens, -1) for table in (ctx.cos, ctx.sin)]

    module = types.ModuleType(patch.MODULE)
    module.__dict__.update({patch.FUNCTION: Fast_RoPE_Embedding_QK})
    monkeypatch.setitem(sys.modules, patch.MODULE, module)
    monkeypatch.setattr(patch, "_device", lambda: "cpu")
    return Fast_RoPE_Embedding_QK


@pytest.mark.parametrize("tokens_first", [True, False])
@pytest.mark.parametrize("indexed", [True, False])
def test_gradients_are_the_same_in_the_projections_layout(function: Any, tokens_first: bool, indexed: bool) -> None:
    torch.manual_seed(0)
    cos, sin = torch.randn(2, 7, 4)
    indices = torch.randint(0, 7, (3, 5), dtype=torch.int32) if indexed else None

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(1)
        inputs = [torch.randn(3, 5, heads, 8).transpose(1, 2).requires_grad_() for heads in (4, 2)]
        given = [torch.randn(3, 5, heads, 8).transpose(1, 2) for heads in (4, 2)]
        if not tokens_first:
            given = [one.contiguous() for one in given]
        return list(torch.autograd.grad(function.apply(*inputs, cos, sin, indices), inputs, given))

    before = gradients()
    assert core.run([patch])[0].applied
    function.rows.clear()
    after = gradients()
    for one, other in zip(after, before, strict=True):
        assert torch.equal(one, other)
        assert not other.transpose(1, 2).is_contiguous()
        assert one.transpose(1, 2).is_contiguous() == (tokens_first and indexed)
    assert function.rows == [15 if tokens_first and indexed else 3]
    assert not patch.needed()


def test_nothing_to_do_without_a_gpu_or_without_the_function(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    monkeypatch.setattr(patch, "_device", lambda: None)
    assert not patch.needed()
    monkeypatch.setattr(patch, "_device", lambda: "cpu")
    monkeypatch.setitem(sys.modules, patch.MODULE, types.ModuleType(patch.MODULE))
    assert not patch.needed()
    patch.apply()


@pytest.mark.unsloth
def test_the_installed_unsloth_has_the_function() -> None:
    """Read, not imported: on a CPU Unsloth leaves its kernels out."""
    import importlib.util
    from pathlib import Path

    unsloth = importlib.util.find_spec("unsloth")
    assert unsloth is not None
    source = (Path(str(unsloth.origin)).parent / "kernels" / "rope_embedding.py").read_text()
    body = source.split(f"class {patch.FUNCTION}(")[1].split("\n\n\n")[0]
    assert "ctx.rope_indices" in body and "dQ_out = torch.empty(dQ.shape" in body
