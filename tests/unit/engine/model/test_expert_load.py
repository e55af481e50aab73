"""Tokens of each expert, against a plain loop over what the routers of single documents say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from finetune.data.collate import collate
from finetune.engine.kernels import grouped_experts
from finetune.engine.model import expert_load
from tests.helpers.tiny import EXPERTS, SMALL, make_moe
from tests.unit.engine.model.test_router_loss import EveryExpert, documents

Rows = list[tuple[np.ndarray, np.ndarray]]

GROUPED: dict[str, Any] = {  # routers that correct their scores and choose among groups
    "n_routed_experts": 8, "num_local_experts": 8, "moe_intermediate_size": 16, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip


def glm() -> Any:
    """Whose corrections move tokens away from where the scores alone would send them."""
    model = make_moe("Glm4Moe", **GROUPED, head_dim=16, num_hidden_layers=3)
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.data = torch.linspace(-0.3, 0.3, 8)
    return model


def routers(model: Any) -> list[torch.nn.Module]:
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


def expected(model: Any, rows: Rows, choices: Callable[[Any], torch.Tensor]) -> list[list[int]]:
    """Tokens by router and expert, one document at a time.

    Args:
        choices: of a router's output: the experts of each token.
    """
    found: dict[int, dict[int, int]] = {}

    def note(router: torch.nn.Module, inputs: Any, output: Any) -> None:
        own = found.setdefault(id(router), {})
        for chosen in choices(output).tolist():
            for expert in chosen:
                own[expert] = own.get(expert, 0) + 1

    hooks = [one.register_forward_hook(note) for one in routers(model)]
    with torch.no_grad():
        for ids, _ in rows:
            model(input_ids=torch.tensor(ids)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    number = 8 if "Glm" in type(model).__name__ else EXPERTS
    return [[found[id(one)].get(expert, 0) for expert in range(number)] for one in routers(model)]


def likeliest(output: Any) -> torch.Tensor:
    return output[0].topk(2).indices


def counted(model: Any, rows: Rows, *, size: int = 3, pack_length: int | None = None) -> list[list[float]]:
    """The same from a step of micro-batches, with padding and a dummy row."""
    load = expert_load.install(model)
    assert load is not None
    return split(load, count(load, model, rows, size, pack_length))


def split(load: expert_load.ExpertLoad, numbers: list[float]) -> list[list[float]]:
    return [list(one) for one in np.split(np.array(numbers), np.cumsum(load.sizes)[:-1])]


def count(load: expert_load.ExpertLoad, model: Any, rows: Rows, size: int, pack_length: int | None) -> list[float]:
    held: list[Any] = [[one] for one in rows]
    if pack_length is not None:
        held = [rows[at : at + 2] for at in range(0, len(rows), 2)]
    held.append([])
    for at in range(0, len(held), size):
        batch = collate(held[at : at + size], pad_token_id=0, pack_length=pack_length)
        lengths = batch.pop("document_lengths")
        batch.pop("packed_seq_lengths", None)
        with load.forward(lengths, batch["input_ids"].numel()):
            loss = model(**batch, use_cache=False).loss
        if loss.requires_grad:
            loss.nan_to_num().backward()
    return load.take()


@pytest.mark.parametrize(
    ("family", "pack_length"), [("Qwen3Moe", None), ("Qwen3Moe", 48), ("Mixtral", 48), ("GptOss", None)]
)
def test_tokens_of_each_expert_without_padding(family: str, pack_length: int | None) -> None:
    model, rows = make_moe(family), documents()
    found = counted(model, rows, pack_length=pack_length)
    tokens = sum(len(ids) for ids, _ in rows)
    assert found == expected(model, rows, likeliest)
    assert [sum(layer) for layer in found] == [2 * tokens] * 2


def test_the_choice_counts_and_not_the_scores() -> None:
    """Of a model whose first layer is dense."""
    model, rows = glm(), documents()
    found = counted(model, rows)
    assert found == expected(model, rows, lambda output: output[2])
    assert found != expected(model, rows, likeliest) and len(found) == 2


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_recomputed_layers_count_once(reentrant: bool) -> None:
    model, rows = make_moe("Qwen3Moe"), documents()
    reference = expected(model, rows, likeliest)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert counted(model, rows) == reference


@pytest.mark.parametrize("targets", [None, ["experts.gate_up_proj", "experts.down_proj"]], ids=["attention", "experts"])
def test_adapters_and_frozen_routers(targets: list[str] | None) -> None:
    rows = documents()
    model: Any = peft.get_peft_model(
        make_moe("Qwen3Moe"), peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets)
    )
    assert counted(model, rows) == expected(model, rows, likeliest)


def test_experts_in_grouped_products_count() -> None:
    """Which compute without calling what is inside of the adapter."""
    rows, targets = documents(), ["experts.gate_up_proj", "experts.down_proj"]
    model: Any = peft.get_peft_model(
        make_moe("Qwen3Moe"), peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets)
    )
    reference = expected(model, rows, likeliest)
    assert grouped_experts.install(model) == 2
    assert counted(model, rows) == reference


def test_passes_outside_of_training_do_not_count() -> None:
    model, rows = make_moe("Qwen3Moe"), documents()
    load = expert_load.install(model)
    assert load is not None
    model(input_ids=torch.arange(3, 20)[None], use_cache=False)
    assert load.take() == [0.0] * 2 * EXPERTS
    first = count(load, model, rows, 3, None)
    assert sum(first) > 0 and load.take() == [0.0] * 2 * EXPERTS
    count_again = count(load, model, rows, 7, None)
    assert count_again == first  # by any division
    with load.forward(torch.tensor([5]), 5):
        model(input_ids=torch.arange(3, 8)[None], use_cache=False)
    load.forget()
    assert load.take() == [0.0] * 2 * EXPERTS


def test_what_is_computed_stays_the_same() -> None:
    ids = torch.arange(3, 20)[None]
    one, other = make_moe("Qwen3Moe"), make_moe("Qwen3Moe")
    expert_load.install(other)
    for model in (one, other):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for (name, mine), (_, theirs) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), name


def test_a_choice_of_no_expert() -> None:
    load = expert_load.ExpertLoad([3])
    with load.forward(torch.tensor([2, -1]), 3):
        load.count(torch.tensor([[0, -1], [2, 3], [1, 1]]), 0)
    assert load.take() == [1.0, 0.0, 1.0]


def test_dense_models_are_left_alone() -> None:
    config = transformers.LlamaConfig(**{name: SMALL[name] for name in SMALL if name != "num_experts_per_tok"})
    model: Any = transformers.LlamaForCausalLM(config)
    assert expert_load.install(model) is None
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.filterwarnings("default")
@pytest.mark.campaign
def test_compiled_layers_without_graph_breaks() -> None:
    """As Unsloth compiles them."""
    model, rows = make_moe("Qwen3Moe", num_hidden_layers=1), documents()
    reference = expected(model, rows, likeliest)
    layer = model.model.layers[0]
    layer.mlp.experts.forward = EveryExpert(layer.mlp.experts)
    load = expert_load.install(model)
    assert load is not None
    layer.forward = torch.compile(layer.forward, backend="aot_eager_decomp_partition", fullgraph=True)
    assert split(load, count(load, model, rows, 7, None)) == reference
