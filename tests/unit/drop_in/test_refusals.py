"""Tests of finetune/drop_in/refusals.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.errors import UserError
from tests.helpers.drop_in import TEXTS, WARNINGS, dataset, refusal

pytestmark = WARNINGS

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a loss of one's own": (dict(compute_loss_func=print), "`compute_loss_func`"),
    "metrics on logits": (dict(compute_metrics=print), "does not build the logits"),
    "logits in between": (dict(preprocess_logits_for_metrics=print), "`preprocess_logits_for_metrics`"),
    "another loss": (dict(loss_type="dft"), "`loss_type='dft'`"),
    "label smoothing": (dict(label_smoothing_factor=0.1), "`label_smoothing_factor=0.1`"),
    "a rank's own mean": (dict(average_tokens_across_devices=False), "`average_tokens_across_devices=False`"),
    "another order": (dict(data_seed=3), "Set `seed`"),
    "groups by length": (dict(train_sampling_strategy="group_by_length", packing=True), "one length"),
    "rows left out": (dict(dataloader_drop_last=True), "`dataloader_drop_last=True`"),
    "the batch that fits": (dict(auto_find_batch_size=True), "Set per_device_train_batch_size"),
    "pushes while training": (dict(push_to_hub=True), "trainer.push_to_hub()"),
    "packs without length": (dict(packing=True, max_length=None), "needs `max_length`"),
    "no turns": (dict(assistant_only_loss=True), "not conversational"),
    "an unknown kind": (
        dict(gradient_checkpointing="full"),
        "`gradient_checkpointing='full'`: expected one of 'offload'",
    ),
    "an unknown argument": (dict(gradient_checkpointing_kwargs={"offloads": True}), "has 'offloads', and takes"),
    "two kinds": (
        dict(gradient_checkpointing="selective", activation_offloading=True),
        "`gradient_checkpointing='selective'` and `activation_offloading=True` are different",
    ),
    "two kinds in one": (
        dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"offload": True, "selective": True}),
        "`offload` in `gradient_checkpointing_kwargs` and `selective` in `gradient_checkpointing_kwargs` are different",
    ),
    "offloading, reentrant": (
        dict(
            gradient_checkpointing=True,
            activation_offloading=True,
            gradient_checkpointing_kwargs={"use_reentrant": True},
        ),
        "`activation_offloading=True` needs `use_reentrant=False`",
    ),
    "selective, context_fn": (
        dict(gradient_checkpointing="selective", gradient_checkpointing_kwargs={"context_fn": print}),
        "`gradient_checkpointing='selective'` sets `context_fn` itself. Remove it",
    ),
    "kernels for a GPU": (dict(use_liger_kernel=True), "`use_liger_kernel=True`: there is no GPU. Remove it"),
    "a choice of kernels": (dict(liger_kernel_config={"rope": False}), "`liger_kernel_config={'rope': False}`"),
    "an end that is no token": (dict(eos_token="<nothing>"), "not found in the vocabulary"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_exactly_is_refused_with_the_remedy(make: Callable[..., Any], name: str) -> None:
    given, words = REFUSED[name]
    assert words in refusal(make, **given)


def test_everything_is_refused_at_once(make: Callable[..., Any]) -> None:
    said = refusal(make, compute_metrics=print, data_seed=3)
    assert said.count("\n  - ") == 2 and "compute_metrics" in said and "data_seed" in said


@pytest.mark.parametrize("method", ["compute_loss", "_get_train_sampler", "get_train_dataloader"])
def test_a_subclass_with_its_own_loss_or_order_is_refused(make: Callable[..., Any], method: str) -> None:
    from finetune import SFTTrainer

    own = type("Mine", (SFTTrainer,), {method: lambda self, *given, **named: None})
    assert f"Mine overrides `{method}`" in refusal(make, trainer=own)


def test_what_is_changed_after_the_trainer_is_created_is_refused(make: Callable[..., Any]) -> None:
    from finetune import SFTTrainer
    from finetune.drop_in.refusals import Refused

    given: list[Any] = []

    class Mine(SFTTrainer):
        def __init__(self, model: Any, args: Any, **others: Any) -> None:
            super().__init__(model, args, **others)
            given.append(args)

    def by_alias(trainer: Any) -> None:
        given[-1].max_steps = 1

    def own_method(trainer: Any) -> None:
        trainer.compute_loss = lambda *_, **__: 0.0

    def of_trainer(trainer: Any) -> None:
        trainer.args.learning_rate *= 2

    def as_a_whole(trainer: Any) -> None:
        trainer.args = copy.copy(trainer.args)

    for change, name in (
        (as_a_whole, "args"),
        (by_alias, "max_steps"),
        (of_trainer, "learning_rate"),
        (own_method, "compute_loss"),
    ):
        trainer = make(max_steps=2, trainer=Mine)
        change(trainer)
        with pytest.raises(Refused, match=f"^{name}: changed after the trainer was created"):
            trainer.train()


def test_tokenized_rows_longer_than_unsloth_loaded_the_model_for_are_refused(make: Callable[..., Any]) -> None:
    from finetune.drop_in import refusals

    rows = make().layout.rows
    refusals.check_row_length(rows, "train", None)
    refusals.check_row_length(rows, "train", int(rows.lengths.max()))
    with pytest.raises(UserError, match="was loaded with max_seq_length=8"):
        refusals.check_row_length(rows, "train", 8)


def test_arguments_that_only_unsloths_own_trainer_reads_are_refused(make: Callable[..., Any]) -> None:
    from finetune.drop_in import refusals

    trainer = make()
    given = {"train_dataset": dataset(TEXTS), "args": trainer.given}
    refusals.check(type(trainer), type(trainer), trainer.given, given)
    trainer.given.embedding_learning_rate = 1e-5
    with pytest.raises(UserError, match="`embedding_learning_rate=1e-05`: all weights are trained with one"):
        refusals.check(type(trainer), type(trainer), trainer.given, given)


def test_rows_that_are_streamed_or_pictures_are_refused(make: Callable[..., Any]) -> None:
    assert "IterableDataset" in refusal(make, dataset(TEXTS).to_iterable_dataset())
    assert "vision" in refusal(make, [{"text": "a", "image": 1}])
    assert "`eval_dataset['a']` is empty" in refusal(make, eval_dataset={"a": dataset(TEXTS).select([])})


def test_models_and_adapters_that_cannot_be_trained_here_are_refused() -> None:
    from finetune.drop_in import refusals

    classifier = type("LlamaForSequenceClassification", (), {})()
    for model in (classifier, SimpleNamespace(get_base_model=lambda: classifier)):
        with pytest.raises(refusals.Refused, match="LlamaForSequenceClassification has no head for text"):
            refusals.check_model(model, None, SimpleNamespace())
    with pytest.raises(refusals.Refused, match="spread over 0, 1"):
        refusals.check_model(SimpleNamespace(hf_device_map={"a": 0, "b": 1}), None, SimpleNamespace())
    quantized = SimpleNamespace(is_quantized=True)
    with pytest.raises(refusals.Refused, match="quantized and has no adapter"):
        refusals.check_model(quantized, None, SimpleNamespace(packing=False))
    refusals.check_model(quantized, SimpleNamespace(), SimpleNamespace(packing=False))
    adapter = SimpleNamespace(alora_invocation_tokens=[5])
    with pytest.raises(refusals.Refused, match="`alora_invocation_tokens` needs rows of one document each"):
        refusals.check_model(SimpleNamespace(), adapter, SimpleNamespace(packing=True))
    # `get_peft_model(base, config)` puts the adapter into `base` as well, which has no method to save it.
    base = SimpleNamespace(peft_config={"default": SimpleNamespace(is_prompt_learning=False)})
    with pytest.raises(refusals.Refused, match="Give SFTTrainer what `get_peft_model` or `PeftModel"):
        refusals.check_model(base, None, SimpleNamespace(packing=False))
    base.get_base_model = lambda: None
    refusals.check_model(base, None, SimpleNamespace(packing=False))
