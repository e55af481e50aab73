"""What is computed again in the backward pass: the gradients of a model that keeps everything, and what is kept."""

from __future__ import annotations

import copy
import typing
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.config.schema import TrainingConfig
from finetune.engine.training import recompute
from finetune.engine.training.recompute import AUTO, KINDS, Recomputation
from finetune.errors import UserError

STACK: Any = SimpleNamespace(backend="transformers", device="cpu")
IDS = torch.randint(1, 50, (2, 33), generator=torch.Generator().manual_seed(0))


class Operators(TorchDispatchMode):
    """Counts the operators that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[operator.name()] += 1
        return operator(*args, **(kwargs or {}))


def llama(adapter: bool = False, dropout: float = 0.0) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM(shape)
    if adapter:
        targets = ["q_proj", "up_proj", "down_proj"]
        lora = LoraConfig(target_modules=targets, lora_dropout=dropout, init_lora_weights=False)
        return get_peft_model(model, lora).train()
    return model.train()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Of one backward pass, with the same dropout each time."""
    torch.manual_seed(1)
    model.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.requires_grad}


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "LoRA with dropout"])
def test_each_kind_has_the_gradients_of_a_model_that_keeps_everything(adapter: bool) -> None:
    """In any order, as a dry run tries them on one model."""
    model = llama(adapter, dropout=0.3)
    expected = gradients(copy.deepcopy(model))
    for kind in ("offload", True, "selective", False, "offload", False):
        recompute.apply(model, Recomputation(kind=kind), STACK)
        found = gradients(model)
        assert all(torch.equal(found[name], one) for name, one in expected.items()), kind
    if adapter:
        assert not model.get_input_embeddings()(IDS).requires_grad  # as before the first kind


@pytest.mark.parametrize(("kind", "times"), [(False, 3), (True, 6), ("selective", 3), ("offload", 6)])
def test_how_often_attention_is_computed(kind: str | bool, times: int) -> None:
    """Once per layer if its output is kept."""
    model = llama()
    recompute.apply(model, Recomputation(kind=kind), STACK)
    with Operators() as run:
        gradients(model)
    assert run.counts["aten::_scaled_dot_product_flash_attention_for_cpu"] == times


def test_attention_that_draws_dropout_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU's kernels do: the masks of the dropout after it are those of the forward pass."""

    @torch.library.custom_op("finetune_tests::attention", mutates_args=())
    def attention(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
        return torch.dropout(x, dropout_p, True).clone()

    attention.register_autograd(lambda context, gradient: (gradient, None))
    monkeypatch.setattr(recompute, "_ATTENTION", ("finetune_tests::",))
    layer = torch.nn.Linear(8, 8)

    def forward(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
        return torch.dropout(attention(layer(x), dropout_p), 0.5, True).sin().sum()

    selective = recompute._function("selective", {"use_reentrant": False})
    for dropout_p, times in ((0.0, 1), (0.3, 2)):
        found = []
        for call in (lambda function, *inputs: function(*inputs), selective):
            torch.manual_seed(0)
            layer.zero_grad()
            with Operators() as run:
                call(forward, torch.ones(4, 8), dropout_p).backward()
            found.append(layer.weight.grad.clone())
        assert torch.equal(*found) and run.counts["finetune_tests::attention"] == times


def test_unsloths_kind_is_the_standard_one_on_the_other_backend() -> None:
    assert recompute.resolve("unsloth", "transformers") is True
    assert recompute.resolve("unsloth", "unsloth") == "unsloth"
    with pytest.raises(UserError, match="offload, which the unsloth backend does not have. Set it to unsloth, true"):
        recompute.resolve("offload", "unsloth")


def test_what_a_run_says() -> None:
    gpu: Any = SimpleNamespace(backend="transformers", device="cuda")
    assert Recomputation(kind=True).summary(STACK) is None
    text = "gradient_checkpointing: offload and tiled_mlp: on a CPU this changes nothing but the code path"
    assert Recomputation(kind="offload", tiled_mlp=True).summary(STACK) == text
    found = Recomputation(kind="offload", tiled_mlp=True).summary(gpu)
    assert found == "Activations: layers' inputs are kept in CPU memory, the rest is computed again; MLPs in tiles"


def test_a_model_that_cannot_recompute_is_refused() -> None:
    model = llama()
    model.supports_gradient_checkpointing = False
    recompute.apply(model, Recomputation(kind=False), STACK)
    with pytest.raises(UserError, match="LlamaForCausalLM cannot recompute its activations"):
        recompute.apply(model, Recomputation(kind=True), STACK)


def test_the_kinds_are_those_of_the_configuration() -> None:
    names, on_or_off = typing.get_args(typing.get_type_hints(TrainingConfig)["gradient_checkpointing"])
    assert on_or_off is bool and {*typing.get_args(names), True, False} == {*KINDS, AUTO}
