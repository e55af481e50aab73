"""The two defects of the fused loss, each on a loss of our own that has it: wrong without its patch, right with it."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from patches import core
from patches import unsloth_fused_loss_backward as deaf
from patches import unsloth_fused_loss_view as view


def release(*, returns_view: bool, ignores_incoming: bool, scaling: float | None = None) -> types.ModuleType:
    """A module with a fused loss like that of a release which has the named defects.

    The forward computes the gradients and saves them, times the scale of an fp16 gradient scaler if there is one.
    """

    class UnslothFusedLoss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden_states, lm_head_weight, labels, scaling=scaling):
            with torch.enable_grad():
                parts = [part.detach().requires_grad_() for part in (hidden_states, lm_head_weight)]
                value = plain_loss(*parts, labels)
                gradients = torch.autograd.grad(value * (1 if scaling is None else scaling), parts)
            ctx.save_for_backward(*gradients)
            ctx.scaling = scaling
            total = torch.zeros(1)[0] if returns_view else torch.zeros(())
            return total.add_(value.detach())

        @staticmethod
        def backward(ctx, grad_output):
            if ignores_incoming:
                return *ctx.saved_tensors, None, None
            return *(part * grad_output / (ctx.scaling or 1) for part in ctx.saved_tensors), None, None

    def unsloth_fused_ce_loss(trainer, hidden_states, lm_head_weight, lm_head_bias, labels, torch_compile=True):
        return UnslothFusedLoss.apply(hidden_states, lm_head_weight, labels, scaling)

    made = types.ModuleType(view.MODULE)
    made.__dict__.update(UnslothFusedLoss=UnslothFusedLoss, unsloth_fused_ce_loss=unsloth_fused_ce_loss)
    return made


def plain_loss(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = (hidden @ head.T)[:, :-1].reshape(-1, len(head))
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1))


def gradients(module: types.ModuleType, factor: float, *, in_place: bool = False) -> list[torch.Tensor]:
    """Of `factor` times the loss, for what is multiplied: the hidden states and the head."""
    loss, *inputs = view.small_loss(module)
    if in_place:
        loss *= factor
    else:
        loss = factor * loss
    return list(torch.autograd.grad(loss, inputs))


def reference(module: types.ModuleType, factor: float) -> list[torch.Tensor]:
    _, hidden, head = view.small_loss(module)
    loss = factor * plain_loss(hidden, head, torch.arange(24).reshape(2, 12))
    return list(torch.autograd.grad(loss, (hidden, head)))


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    def put(**defects) -> types.ModuleType:
        module = release(**defects)
        monkeypatch.setitem(sys.modules, view.MODULE, module)
        return module

    return put


def test_loss_that_is_a_view(install) -> None:
    module = install(returns_view=True, ignores_incoming=False)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        gradients(module, 3, in_place=True)
    assert (view.needed(), deaf.needed()) == (True, False)

    view.apply()
    assert not view.needed()
    torch.testing.assert_close(gradients(module, 3, in_place=True), reference(module, 3))
    loss, hidden, head = view.small_loss(module)
    torch.testing.assert_close(loss, plain_loss(hidden, head, torch.arange(24).reshape(2, 12)))


def test_backward_that_ignores_the_incoming_gradient(install) -> None:
    module = install(returns_view=False, ignores_incoming=True)
    torch.testing.assert_close(gradients(module, 4), reference(module, 1))  # a quarter of what it should be
    assert (view.needed(), deaf.needed()) == (False, True)

    deaf.apply()
    assert not deaf.needed()
    torch.testing.assert_close(gradients(module, 4), reference(module, 4))


def test_gradient_scale_of_fp16_is_kept(install) -> None:
    """The saved gradients hold the scaler's factor 8 already, which arrives again as the incoming gradient."""
    module = install(returns_view=False, ignores_incoming=True, scaling=8.0)
    deaf.apply()
    torch.testing.assert_close(gradients(module, 8), reference(module, 8))
    torch.testing.assert_close(gradients(module, 16), reference(module, 16))


def test_graph_that_is_kept_gives_the_same_gradient_again(install) -> None:
    module = install(returns_view=False, ignores_incoming=True)
    deaf.apply()
    loss, *inputs = view.small_loss(module)
    first = torch.autograd.grad(2 * loss, inputs, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(2 * loss, inputs), first)


def test_one_patch_does_not_hide_the_other_defect(install) -> None:
    """Copying the loss is the popular repair: it ends the error, and the gradients stay at 1 over the world size."""
    module = install(returns_view=True, ignores_incoming=True)
    view.apply()
    torch.testing.assert_close(gradients(module, 2, in_place=True), reference(module, 1))
    assert deaf.needed()
    deaf.apply()
    torch.testing.assert_close(gradients(module, 2, in_place=True), reference(module, 2))


def test_applied_twice_is_applied_once(install) -> None:
    module = install(returns_view=True, ignores_incoming=True)
    assert [verdict.applied for verdict in core.run([view, deaf])] == [True, True]
    patched = module.UnslothFusedLoss.forward, module.UnslothFusedLoss.backward
    view.apply()
    deaf.apply()
    assert (module.UnslothFusedLoss.forward, module.UnslothFusedLoss.backward) == patched
    assert [verdict.applied for verdict in core.run([view, deaf])] == [False, False]


def test_healthy_loss_is_left_alone(install) -> None:
    module = install(returns_view=False, ignores_incoming=False)
    before = module.UnslothFusedLoss.forward, module.UnslothFusedLoss.backward
    view.apply()
    deaf.apply()
    assert (module.UnslothFusedLoss.forward, module.UnslothFusedLoss.backward) == before


@pytest.mark.parametrize("factor", [0.0, float("nan")])
def test_gradient_that_is_no_number_or_zero_stops_the_run(install, factor: float) -> None:
    module = install(returns_view=False, ignores_incoming=False)
    broken = module.UnslothFusedLoss.backward
    module.UnslothFusedLoss.backward = staticmethod(
        lambda ctx, grad: tuple(part if part is None else part * factor for part in broken(ctx, grad))
    )
    with pytest.raises(RuntimeError, match="still present"):
        core.run([deaf])


@pytest.mark.parametrize("patch", [view, deaf])
def test_probe_that_fails_stops_the_run(install, patch: types.ModuleType) -> None:
    module = install(returns_view=False, ignores_incoming=False)
    module.UnslothFusedLoss.forward = staticmethod(lambda ctx, *args: 1 / 0)
    with pytest.raises(RuntimeError, match="its probe failed"):
        core.run([patch])


def test_nothing_is_looked_at_where_unsloth_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, view.MODULE, raising=False)
    assert not view.needed()
    assert not deaf.needed()
