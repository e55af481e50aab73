"""The loss of a micro-batch as a share of its step's, against sums worked out by hand; what steps yield."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from finetune.engine.model.trial import is_fused_head_exact
from finetune.engine.training.loss import StepStatistics, loss_from_mean
from tests.helpers.tiny import make_moe


class MeanModel(torch.nn.Module):
    """Returns the mean over its own labels whatever count it is given, as some forwards do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(11, 11)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **ignored: Any) -> dict[str, torch.Tensor]:
        logits = self.table(input_ids)[:, :-1].flatten(0, 1)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)}


def batch(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Rows of tokens; a negative one is context and not supervised."""
    ids = torch.tensor([[abs(token) for token in row] for row in rows])
    labels = torch.tensor([[token if token > 0 else -100 for token in row] for row in rows])
    return {"input_ids": ids, "labels": labels}


MICRO_BATCHES = [  # of two ranks with two accumulation steps each: ragged labels, and one batch with none
    [batch([[-1, 2, 3, 4, 5]]), batch([[-1, -2, -3, 4, -5]])],
    [batch([[-1, -2, -3, -4, -5]]), batch([[-6, 7, 8, -9, 10]])],
]


def test_a_model_that_ignores_counts_gets_the_gradient_of_the_global_batch() -> None:
    model = MeanModel()
    flat = [one for rank in MICRO_BATCHES for one in rank]
    total = sum(int((one["labels"][:, 1:] != -100).sum()) for one in flat)
    reference = 0.0
    for one in flat:
        logits = model.table(one["input_ids"])[:, :-1].flatten(0, 1)
        reference = reference + torch.nn.functional.cross_entropy(
            logits, one["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
    (reference / total).backward()
    expected = model.table.weight.grad.clone()

    model.zero_grad()
    for rank in MICRO_BATCHES:
        for one in rank:
            loss = loss_from_mean(model, one, torch.tensor(total))  # type: ignore[arg-type]
            assert torch.isfinite(loss)
            loss.backward()
    assert torch.allclose(model.table.weight.grad, expected, atol=1e-7)


def test_statistics_are_sums_over_steps_until_they_are_taken() -> None:
    found = StepStatistics()
    assert (found.take_losses(), found.take_tokens(), found.take_load_balancing()) == ([], None, None)
    for loss, ends in ((1.0, False), (2.0, True), (4.0, True), (8.0, False)):
        found.add_loss(torch.tensor(loss), ends_step=ends)
        found.add_load_balancing(torch.tensor(loss))
    tokens = types.SimpleNamespace(is_top1=torch.tensor([1, 0, 1]), entropy=torch.tensor([0.5, 0.5, 1.0]))
    found.add_tokens(tokens)
    found.add_tokens(tokens)
    found.add_tokens(types.SimpleNamespace())  # a head that computes neither
    assert found.take_losses() == [3.0, 4.0] and found.take_losses() == []
    assert found.take_tokens() == (4.0, 4.0) and found.take_tokens() is None
    assert found.take_load_balancing() == 15.0 and found.take_load_balancing() is None
    found.add_loss(torch.tensor(16.0), ends_step=True)  # and the micro-batch before it
    assert found.take_losses() == [24.0]
    found.add_loss(torch.tensor(1.0), ends_step=False)
    found.forget()
    found.add_loss(torch.tensor(2.0), ends_step=True)
    assert found.take_losses() == [2.0]


@pytest.mark.parametrize(
    ("family", "changes", "exact"),
    [
        ("Granite", {"logits_scaling": 3.0}, True),
        ("Gemma2", {"final_logit_softcapping": 0.1}, True),
        ("Granite", {"final_logit_softcapping": 0.1}, False),  # which it does not have
        ("ModernBertDecoder", {}, False),
        ("Llama4Text", {}, False),
    ],
)
def test_a_fused_head_that_is_not_the_models_own_is_found(
    family: str, changes: dict, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trl.trainer.utils

    class Kernel:
        """What TRL's kernel for GPUs computes, written out."""

        @staticmethod
        def apply(
            hidden: Any, weight: Any, bias: Any, labels: Any, temperature: float, chunk: int, cap: Any, scale: float,
            outputs: Any,
        ) -> Any:  # fmt: skip
            logits = torch.nn.functional.linear(hidden, weight, bias) * scale
            logits = logits if cap is None else cap * torch.tanh(logits / cap)
            return logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0], None, None, None, None

    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", Kernel)
    model = make_moe(family, **changes)
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_()
    trl.trainer.utils.add_fused_lm_head(model)
    assert is_fused_head_exact(model) is exact and model.training

    def broken(**given: Any) -> Any:
        raise RuntimeError("a kernel is missing")

    monkeypatch.setattr(model, "forward", broken)
    if exact:
        with pytest.raises(RuntimeError, match="a kernel is missing"):
            is_fused_head_exact(model)
        assert model.training  # as it was, all the same
