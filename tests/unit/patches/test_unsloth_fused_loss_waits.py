"""Positions of supervised tokens that the host knows: on a function of our own like Unsloth's. The installed one is
tried in test_unsloth_packed_fused_loss. Lengths that mask nothing: on the installed one."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.engine.training.batches import predicting
from patches import core
from patches import unsloth_fused_loss_waits as patch
from tests.helpers import launch


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


@pytest.mark.unsloth
@pytest.mark.process
def test_no_lengths_are_sent_to_mask_what_is_masked(tmp_path: Path) -> None:
    """By the function that Unsloth's Llama calls before its loss."""
    script = """
import numpy, unsloth
from finetune.data.collate import collate
from patches import core, unsloth_fused_loss_waits as patch
from unsloth.models import llama

documents = [(numpy.arange(count), numpy.full(count, 7)) for count in (3, 5, 4)]
batch = collate([documents[:2], documents[2:]], pad_token_id=0, pack_length=10)
labels, lengths = batch["labels"], batch["packed_seq_lengths"]
assert (labels == 7).sum() == 9  # all but the first of each document
assert llama.mask_packed_boundary_labels(labels, lengths).equal(labels)
wrong = labels.masked_fill(labels == -100, 7)
assert not llama.mask_packed_boundary_labels(wrong, lengths).equal(wrong)

applied = core.run([patch])[0].applied
outside = llama.mask_packed_boundary_labels(labels, lengths) is labels
with patch.known(labels.nonzero(), labels.numel()):
    print("RESULT", applied, outside, llama.mask_packed_boundary_labels(labels, lengths) is labels)
"""
    done = launch.on_the_installed_unsloth(script, tmp_path)
    assert "RESULT True False True" in done.stdout, done.stderr[-4000:]


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
