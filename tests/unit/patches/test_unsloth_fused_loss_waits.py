"""Positions of supervised tokens that the host knows: on a function of our own like Unsloth's. The installed one is
tried in test_unsloth_packed_fused_loss. Lengths that mask nothing: on the installed one."""

from __future__ import annotations

import ast
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetune.data.collate import collate
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


@pytest.mark.unsloth
def test_no_lengths_are_sent_to_mask_what_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsloth's functions from its source, which can't be imported on a CPU."""
    unsloth: Any = importlib.util.find_spec("unsloth")
    tree = ast.parse((Path(unsloth.origin).parent / "utils" / "packing.py").read_text())
    names = (patch.SENDS, "mask_packed_boundary_labels")
    tree.body = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name in names]
    made = types.ModuleType(patch.PACKING)
    made.__dict__.update({"torch": torch, "Any": Any, "Optional": Any | None})
    exec(compile(tree, "packing.py", "exec"), made.__dict__)
    monkeypatch.delitem(sys.modules, patch.MODULE, raising=False)
    monkeypatch.setitem(sys.modules, patch.PACKING, made)

    documents = [(np.arange(count), np.full(count, 7)) for count in (3, 5, 4)]
    batch = collate([documents[:2], documents[2:]], pad_token_id=0, pack_length=10)
    labels, lengths = batch["labels"], batch["packed_seq_lengths"]
    assert (labels == 7).sum() == 9  # all but the first of each document
    assert made.mask_packed_boundary_labels(labels, lengths).equal(labels)
    wrong = labels.masked_fill(labels == -100, 7)
    assert not made.mask_packed_boundary_labels(wrong, lengths).equal(wrong)

    assert core.run([patch])[0].applied
    assert made.mask_packed_boundary_labels(labels, lengths) is not labels
    with patch.known(predicting(labels), labels.numel()):
        assert made.mask_packed_boundary_labels(labels, lengths) is labels


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
