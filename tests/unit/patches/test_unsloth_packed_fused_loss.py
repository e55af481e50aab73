"""Which of Unsloth's losses packs get, on a decision of our own like Unsloth's, and on the installed one."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from patches import core
from patches import unsloth_packed_fused_loss as patch
from tests.helpers import launch

KNOWN = {"ignore_index", "logit_softcapping"}


def module(newer_at_all: bool = True, known: set[str] = KNOWN) -> types.ModuleType:
    made = types.ModuleType(patch.MODULE)
    made._use_chunked_ce = lambda kwargs, target_gb: (  # type: ignore[attr-defined]
        newer_at_all and target_gb is None and kwargs.keys() <= known
    )
    return made


def other_arguments() -> types.ModuleType:
    made = types.ModuleType(patch.MODULE)
    made._use_chunked_ce = lambda kwargs: True  # type: ignore[attr-defined]
    return made


def test_lengths_do_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    made = module()
    monkeypatch.setitem(sys.modules, patch.MODULE, made)
    assert core.run([patch])[0].applied
    given = {"ignore_index": -100, "packed_seq_lengths": [3, 4]}
    assert made._use_chunked_ce(given, None)
    assert not made._use_chunked_ce(given, 1.0)
    assert not made._use_chunked_ce({"label_smoothing": 0.1, **given}, None)
    assert given.keys() == {"ignore_index", "packed_seq_lengths"}


@pytest.mark.parametrize(
    "made",
    [
        None,
        types.ModuleType(patch.MODULE),
        module(newer_at_all=False),
        module(known=KNOWN | {patch.UNUSED}),
        other_arguments(),
    ],
)
def test_nothing_to_do(made: types.ModuleType | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not loaded, another release, the newer kernels switched off, or they know the lengths."""
    monkeypatch.delitem(sys.modules, patch.MODULE, raising=False)
    if made is not None:
        monkeypatch.setitem(sys.modules, patch.MODULE, made)
    before = dict(vars(made)) if made is not None else {}
    assert not patch.needed()
    patch.apply()
    assert made is None or vars(made) == before


@pytest.mark.unsloth
@pytest.mark.process
def test_the_installed_unsloth(tmp_path: Path) -> None:
    """Loss and gradients over packs, through the function that the model calls, before and after the patch. Then with
    the supervised positions known, for which the loss no longer looks. First the probes of older defects of the loss,
    which this release does not have."""
    script = """
import sys, unsloth, torch
from patches import core, unsloth_fused_loss_backward, unsloth_fused_loss_view, unsloth_packed_fused_loss as patch
assert float(unsloth_fused_loss_view.small_loss(unsloth_fused_loss_view.fused_loss())[0].detach()) > 1
assert not any(verdict.needed for verdict in core.run([unsloth_fused_loss_view, unsloth_fused_loss_backward]))
from unsloth_zoo.fused_losses import cross_entropy_loss, forward_adapter

def step():
    torch.manual_seed(0)
    hidden, head = torch.randn(1, 12, 16, requires_grad=True), torch.nn.Linear(16, 64, bias=False)
    lengths, count = torch.tensor([5, 7], dtype=torch.int32), torch.tensor(20)
    loss = forward_adapter.unsloth_fused_lm_head_loss(
        hidden, head, torch.arange(12)[None], num_items_in_batch=count, packed_seq_lengths=lengths, torch_compile=False
    )
    return loss.detach(), *torch.autograd.grad(loss, (hidden, head.weight))

called, traced = [], cross_entropy_loss._chunked_ce_traced
cross_entropy_loss._chunked_ce_traced = lambda *args: (called.append(1), traced(*args))[1]
before = step()
none = not called
applied = core.run([patch])[0].applied
after = step()
torch.testing.assert_close(after, before)

from patches import unsloth_fused_loss_waits as waits
from torch.utils._python_dispatch import TorchDispatchMode

class Looks(TorchDispatchMode):
    times = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        Looks.times += operator is torch.ops.aten.nonzero.default
        return operator(*args, **(kwargs or {}))

looks, fused = [], sys.modules[waits.MODULE]
waited = core.run([waits])[0].applied
places = torch.arange(11)  # this loss does not know the lengths; the last token predicts none
whole = fused._ce_impl
for known in (False, True):
    Looks.times = 0
    def watched(*args):
        with Looks():
            return whole(*args)
    fused._ce_impl = watched
    with waits.known(places if known else places[:0], 12 if known else 0):
        torch.testing.assert_close(step(), before)
    looks.append(Looks.times)
print("RESULT", none, applied, len(called), waited, looks)
"""
    done = launch.on_the_installed_unsloth(script, tmp_path)
    assert "RESULT True True 3 True [1, 0]" in done.stdout, done.stderr[-4000:]
