"""Positions of supervised tokens that the host knows: on a function of our own like Unsloth's. The installed one is
tried in test_unsloth_packed_fused_loss."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from finetune.engine.training.batches import predicting
from patches import core
from patches import unsloth_fused_loss_waits as patch


def module() -> types.ModuleType:
    made = types.ModuleType(patch.MODULE)

    def positions(targets: torch.Tensor, mask: Any, words: int, ignored: int) -> tuple[torch.Tensor, int]:
        found = ((targets != ignored) & (targets < words)).nonzero().squeeze(-1)
        return found, len(found)

    made._keep_index = positions  # type: ignore[attr-defined]
    return made


def test_a_loss_over_the_micro_batch_takes_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    made = module()
    labels = torch.tensor([[-100, 5, -100, 7], [-100, -100, 6, 5]])
    shifted = torch.tensor([5, -100, 7, -100, -100, 6, 5, -100])
    asked = made._keep_index(shifted, None, 9, -100)[0]
    monkeypatch.setitem(sys.modules, patch.MODULE, made)
    assert core.run([patch])[0].applied
    places = predicting(labels)
    assert places.tolist() == asked.tolist() == [0, 2, 5, 6]
    with patch.known(places, labels.numel()):
        found, count = made._keep_index(shifted, None, 9, -100)
        assert found is places and count == 4
        part, _ = made._keep_index(shifted[:4], None, 9, -100)  # of a part of the tokens, or of a mask, they are others
        masked, _ = made._keep_index(shifted, torch.ones(8, dtype=torch.bool), 9, -100)
        assert part.tolist() == [0, 2] and masked is not places
    assert made._keep_index(shifted, None, 9, -100)[0] is not places


@pytest.mark.parametrize("made", [None, types.ModuleType(patch.MODULE), "other arguments"])
def test_nothing_to_do(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not loaded, or another release."""
    monkeypatch.delitem(sys.modules, patch.MODULE, raising=False)
    if made is not None:
        if isinstance(made, str):
            made = types.ModuleType(patch.MODULE)
            made._keep_index = lambda targets: (targets, len(targets))
        monkeypatch.setitem(sys.modules, patch.MODULE, made)
    assert not patch.needed()
    patch.apply()
