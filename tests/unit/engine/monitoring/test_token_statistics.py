"""Accuracy, entropy and the loss of each document, against loops over single tokens."""

from __future__ import annotations

import types

import pytest
import torch

from finetune.engine.monitoring import token_statistics


def batch(packed: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor, list[list[tuple[int, int]]]]:
    """Inputs, logits and the positions (row, column) of each document's tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 1, 7, 3]
    if packed:
        places = [[(0, start + k) for k in range(n)] for n, start in zip(lengths, [0, 5, 6, 13], strict=True)]
        shape = (1, 18)  # two positions of padding, a segment of their own
        positions = torch.cat([torch.arange(n) for n in [*lengths, 2]])[None]
    else:
        places = [[(row, k) for k in range(n)] for row, n in enumerate(lengths)]
        shape, positions = (4, 7), None
    ids = torch.randint(0, 11, shape, generator=generator)
    labels = torch.full(shape, -100)
    for document in places:
        for row, column in document[2:]:  # a prompt of two tokens
            labels[row, column] = ids[row, column]
    inputs = {"input_ids": ids, "labels": labels} | ({} if positions is None else {"position_ids": positions})
    return inputs, torch.randn(*shape, 11, generator=generator), places


@pytest.mark.parametrize("packed", [True, False])
def test_statistics_equal_a_loop_over_tokens(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_statistics, "CHUNK", 3)
    inputs, logits, places = batch(packed)
    found = token_statistics.from_outputs(types.SimpleNamespace(logits=logits), inputs["labels"][:, 1:])
    assert found is not None
    losses, entropy, right = [], 0.0, 0
    for document in places:
        own = []
        for row, column in document[2:]:
            chances = logits[row, column - 1].softmax(0)
            own.append(-float(chances[inputs["labels"][row, column]].log()))
            entropy -= float((chances * chances.log()).sum())
            right += int(chances.argmax()) == int(inputs["labels"][row, column])
        losses += [sum(own) / len(own)] if own else []
    assert float(found.entropy.sum()) == pytest.approx(entropy, rel=1e-5)
    assert float(found.is_top1.sum()) == right
    assert token_statistics.document_losses(found, inputs).tolist() == pytest.approx(losses, rel=1e-5)


def test_outputs_without_logits_have_no_statistics() -> None:
    """Unsloth's fused loss returns an object that is not a tensor, or an empty one."""
    labels = torch.zeros(1, 4, dtype=torch.long)
    for logits in (None, "empty", torch.empty(0)):
        assert token_statistics.from_outputs(types.SimpleNamespace(logits=logits), labels) is None


def test_nothing_supervised() -> None:
    inputs, logits, _ = batch(packed=False)
    inputs["labels"][:] = -100
    found = token_statistics.from_outputs(types.SimpleNamespace(logits=logits), inputs["labels"][:, 1:])
    assert found is not None and float(found.is_top1.sum()) == 0.0
    assert token_statistics.document_losses(found, inputs).tolist() == []
