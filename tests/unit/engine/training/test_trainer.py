"""The trainer's own methods: its optimizer, and the loss that it hands on."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import pytest
import torch
import transformers
import trl
from transformers.training_args import OptimizerNames

from finetune.engine.training import trainer as trainer_module
from finetune.engine.training.loss import StepStatistics
from finetune.engine.training.trainer import SFTTrainer
from finetune.errors import UserError
from finetune.runtime.ranks.context_group import ContextGroup


@pytest.mark.parametrize("name", ["galore_adamw", "grokadamw"])  # transformers raises an ImportError, a ValueError
def test_an_optimizer_whose_package_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    package = {"galore_adamw": "galore_torch"}.get(name, name)
    monkeypatch.setattr(f"transformers.trainer_optimizer.is_{package}_available", lambda: False)
    adam = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
    args = types.SimpleNamespace(optim=OptimizerNames(name), learning_rate=1e-3, optim_args=None, **adam)
    with pytest.raises(UserError, match=f"^training.optim: {name} cannot be used here: .*install .?{package}"):
        SFTTrainer.get_optimizer_cls_and_kwargs(object.__new__(SFTTrainer), args)


def test_a_loss_that_is_a_view_is_cloned(monkeypatch: pytest.MonkeyPatch) -> None:
    """`loss *= world size` in place, as accelerate does, fails on the view that a fused kernel returned."""

    seen = {}

    def compute_loss(self: Any, model: Any, inputs: Any, **arguments: Any) -> tuple[torch.Tensor, Any]:
        seen.update(arguments)
        return torch.ones(1, requires_grad=True).expand(3)[0], {}

    monkeypatch.setattr(transformers.Trainer, "compute_loss", compute_loss)
    trainer: Any = object.__new__(SFTTrainer)
    trainer.model_accepts_loss_kwargs, trainer.load_balancing = True, None
    trainer.stack = types.SimpleNamespace(backend="transformers", device="cpu")
    trainer.statistics, trainer.context = StepStatistics(), ContextGroup()
    loss = trainer.compute_loss(None, {}, num_items_in_batch=torch.tensor(4), extra="kept")
    assert not loss._is_view()
    loss *= 2
    loss.backward()
    assert seen["extra"] == "kept" and int(seen["num_items_in_batch"]) == 4  # nothing is dropped on the way


@pytest.mark.parametrize("accepts", [True, False])
def test_no_logits_on_a_gpu_even_if_the_model_ignores_the_count(accepts: bool) -> None:
    """The sum over the micro-batch's tokens / the step's tokens x ranks, from the fused head."""
    asked = []

    def model(**given: Any) -> Any:
        asked.append(given)
        return types.SimpleNamespace(log_probs=torch.tensor([[-1.0, -2.0, 0.0]], requires_grad=True))

    trainer: Any = object.__new__(SFTTrainer)
    trainer.model_accepts_loss_kwargs, trainer.load_balancing, trainer._has_fused_head = accepts, None, True
    trainer.stack = types.SimpleNamespace(backend="transformers", device="cuda")
    trainer.args, trainer.statistics = types.SimpleNamespace(world_size=2), StepStatistics()
    trainer.loss_is_scaled_for_ga = True
    loss = trainer.compute_loss(model, {"labels": torch.zeros(1, 4)}, num_items_in_batch=torch.tensor(6))
    assert float(loss.detach()) == 1.0 and asked[0]["fused_lm_head"]


def test_a_step_does_not_walk_over_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers puts the model into training mode in each pass and looks for its weights in each step. A model that
    an evaluation has left in the other mode is put back, also inside DDP's wrapper."""
    layer = torch.nn.Linear(3, 2)
    wrapper = torch.nn.ModuleDict({"module": torch.nn.Sequential(torch.nn.Dropout(), layer)})
    walks: list[bool] = []
    monkeypatch.setattr(torch.nn.Linear, "train", lambda self, mode=True: walks.append(mode))
    with trainer_module._in_its_mode(wrapper):
        assert wrapper.train() is wrapper and not walks
    wrapper["module"].eval()
    with trainer_module._in_its_mode(wrapper):
        wrapper.train()
    assert walks == [False, True] and wrapper["module"][0].training and "train" not in vars(wrapper)

    layer.bias.requires_grad_(False)
    layer.weight.grad = torch.full((2, 3), 2.0)
    trainer: Any = object.__new__(SFTTrainer)
    trainer.sharded, trainer._trained, trainer.args = False, None, types.SimpleNamespace(max_grad_norm=1.0)
    trainer.accelerator = types.SimpleNamespace(clip_grad_norm_=torch.nn.utils.clip_grad_norm_)
    for _ in range(2):
        norm = trainer._clip_grad_norm(wrapper)
        monkeypatch.setattr(torch.nn.Module, "named_modules", None)
    assert float(norm) == pytest.approx(1.0, abs=1e-5) and layer.weight.grad.norm() == pytest.approx(1.0, abs=1e-5)


def test_weights_that_are_unfrozen_between_two_trainings_are_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may train an adapter first, then another with it."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    model[1].requires_grad_(False)
    trainer: Any = object.__new__(SFTTrainer)
    trainer.sharded, trainer.until_end, trainer.recomputation = False, contextlib.ExitStack(), None
    trainer.args = types.SimpleNamespace(max_grad_norm=1.0)
    trainer.accelerator = types.SimpleNamespace(clip_grad_norm_=torch.nn.utils.clip_grad_norm_)
    for name in ("set_recomputation", "use_evaluation_weights"):
        monkeypatch.setattr(SFTTrainer, name, lambda *given: None)

    def clips(self: Any, **kwargs: Any) -> float:
        for one in model.parameters():
            one.grad = torch.ones_like(one) if one.requires_grad else None
        return float(self._clip_grad_norm(model))

    monkeypatch.setattr(trl.SFTTrainer, "train", clips)
    assert trainer._train_to_end() == pytest.approx(8**0.5)
    model[1].requires_grad_(True)
    assert trainer._train_to_end() == pytest.approx(14**0.5)
