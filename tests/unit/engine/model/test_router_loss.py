"""The load-balancing loss of a mixture of experts, against transformers' own function on one document at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from finetune.data.collate import collate
from finetune.engine.model import router_loss
from tests.helpers.tiny import CHOSEN, EXPERTS, FAMILIES, VOCABULARY, make_moe

COEFFICIENT = 0.5


def documents(count: int = 6) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of different lengths; of the first half of each nothing is supervised, and of one document nothing at all."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        ids = rng.integers(3, VOCABULARY, size=int(rng.integers(3, 20)))
        supervised = np.where(np.arange(len(ids)) < len(ids) * (2 if number == 1 else 0.5), -100, ids)
        found.append((ids, supervised))
    return found


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def reference(model: Any, rows: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """Backward pass of the objective, document by document. Returns the load-balancing loss."""
    labels = sum(int((supervised[1:] != -100).sum()) for _, supervised in rows)
    tokens = sum(len(ids) for ids, _ in rows)
    of_granite: list[torch.Tensor] = []  # whose outputs have no router logits
    for module in model.modules():
        if type(module).__name__.startswith("Granite") and type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda module, inputs, output: of_granite.append(output[2]))
    value = 0.0
    for ids, supervised in rows:
        output = model(input_ids=torch.tensor(ids)[None], use_cache=False, output_router_logits=True)
        loss = torch.nn.functional.cross_entropy(output.logits[0, :-1], torch.tensor(supervised[1:]), reduction="sum")
        logits: Any = output.router_logits or tuple(of_granite)
        term: Any = load_balancing_loss_func(logits, EXPERTS, CHOSEN)
        (loss / labels + COEFFICIENT * term * len(ids) / tokens).backward()
        value += float(term.detach()) * len(ids) / tokens
        of_granite.clear()
    return value


def trained(model: Any, batches: list[dict[str, torch.Tensor]], rows: list[Any], scale: float = 1.0) -> float:
    """The same step by micro-batches."""
    term = router_loss.install(model, COEFFICIENT)
    assert term is not None
    labels = sum(int((one["labels"][:, 1:] != -100).sum()) for one in batches)
    tokens = sum(len(ids) for ids, _ in rows)
    value = 0.0
    for batch in batches:
        lengths = batch.pop("document_lengths")
        batch.pop("packed_seq_lengths", None)
        with term.forward(lengths, batch["input_ids"].numel(), 1 / tokens, scale):
            output = model(**batch, num_items_in_batch=torch.tensor(labels), use_cache=False)
        assert output.loss is not None and getattr(output, "aux_loss", None) is None
        loss, share = term.attach(output.loss * scale)
        (loss / scale).backward()
        term.end()
        value += float(share)
    return value


def batches_of(rows: list[Any], size: int, pack_length: int | None) -> list[dict[str, torch.Tensor]]:
    """Packs of two documents with padding behind them, or padded rows; and a micro-batch of a dummy row alone."""
    held: list[Any] = [[one] for one in rows] if pack_length is None else [rows[at : at + 2] for at in range(0, 6, 2)]
    held.append([])
    return [collate(held[at : at + size], pad_token_id=0, pack_length=pack_length) for at in range(0, len(held), size)]


@pytest.mark.parametrize("pack_length", [None, 48], ids=["padded", "packed"])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_step_is_the_mean_over_documents_by_any_division(size: int, pack_length: int | None) -> None:
    rows = documents()
    one, other = make_moe("Qwen3Moe"), make_moe("Qwen3Moe")
    expected = reference(one, rows)
    found = trained(other, batches_of(rows, size, pack_length), rows)
    assert found == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(gradients(other), gradients(one), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_models(family: str) -> None:
    rows = documents()
    one, other = make_moe(family), make_moe(family)
    expected = reference(one, rows)
    found = trained(other, batches_of(rows, 7, None), rows)
    assert found == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(gradients(other), gradients(one), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_recomputed_layers_have_the_same_gradient(reentrant: bool) -> None:
    """Reentrant checkpointing, as Unsloth's on a GPU, computes the first forward pass without a graph."""
    rows = documents()
    one, other = make_moe("Qwen3Moe"), make_moe("Qwen3Moe")
    reference(one, rows)
    other.gradient_checkpointing_enable({"use_reentrant": reentrant})
    other.enable_input_require_grads()
    trained(other, batches_of(rows, 3, None), rows)
    torch.testing.assert_close(gradients(other), gradients(one), rtol=1e-4, atol=1e-6)


def test_what_scales_the_loss_scales_the_term() -> None:
    """A gradient scaler, or the world size before DDP's mean over ranks."""
    rows = documents()
    one, other = make_moe("Qwen3Moe"), make_moe("Qwen3Moe")
    plain = trained(one, batches_of(rows, 3, None), rows)
    assert trained(other, batches_of(rows, 3, None), rows, scale=64.0) == plain
    torch.testing.assert_close(gradients(other), gradients(one), rtol=1e-4, atol=1e-6)


def test_a_forward_pass_outside_training_adds_nothing() -> None:
    model = make_moe("Qwen3Moe")
    trained(model, batches_of(documents(), 7, None), documents())
    model.zero_grad()
    fresh = make_moe("Qwen3Moe")
    ids = torch.arange(3, 20)[None]
    for each in (model, fresh):
        each(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    torch.testing.assert_close(gradients(model), gradients(fresh))


def test_a_model_with_one_expert_has_no_term() -> None:
    assert router_loss.install(make_moe("GraniteMoe", num_local_experts=1, num_experts_per_tok=1), 0.01) is None


def test_models_without_router_logits_are_refused_with_the_remedy() -> None:
    with pytest.raises(
        router_loss.NoRoutersError, match="LlamaForCausalLM does not return.*router_aux_loss_coef to 0.0"
    ):
        router_loss.install(make_moe("Llama"), 0.01)


def test_routers_that_a_forward_pass_leaves_out_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel for the whole block would: the term would be missing without a word."""
    model = make_moe("Qwen3Moe")
    for layer in model.model.layers:
        monkeypatch.setattr(layer.mlp, "forward", lambda hidden: hidden)
    with pytest.raises(router_loss.NoRoutersError, match="without calling its routers.*router_aux_loss_coef"):
        trained(model, batches_of(documents(), 7, None), documents())


class EveryExpert:
    """Qwen3Moe's experts, all for every token: torch.compile cannot choose among them without a graph break."""

    def __init__(self, experts: Any) -> None:
        self.experts = experts

    def __call__(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("td,eod->teo", hidden, self.experts.gate_up_proj).chunk(2, -1)
        outputs = torch.einsum("tei,edi->ted", self.experts.act_fn(gate) * up, self.experts.down_proj)
        return (outputs * torch.zeros(len(hidden), EXPERTS).scatter(1, chosen, weights)[..., None]).sum(1)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.campaign
def test_compiled_layers_without_graph_breaks(recomputed: bool) -> None:
    """As Unsloth compiles them. What depends on the forward pass alone is not computed before its end."""
    rows = documents()
    one, other = make_moe("Qwen3Moe", num_hidden_layers=1), make_moe("Qwen3Moe", num_hidden_layers=1)
    reference(one, rows)
    layer = other.model.layers[0]
    layer.mlp.experts.forward = EveryExpert(layer.mlp.experts)
    layer.forward = torch.compile(layer.forward, backend="aot_eager_decomp_partition", fullgraph=True)
    if recomputed:
        other.gradient_checkpointing_enable({"use_reentrant": True})
        other.enable_input_require_grads()
    trained(other, batches_of(rows, 7, None), rows)
    torch.testing.assert_close(gradients(other), gradients(one), rtol=1e-4, atol=1e-6)
