"""Arguments that cannot be kept exactly on any number of GPUs: refused at construction, with the remedy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from finetune.config.rules import why_no_optimizer
from finetune.errors import UserError

_EXACT = "the loss is the mean over the supervised tokens of the whole global batch, which only this trainer's own code"
_ORDER = "`seed` alone sets the order of the data, so that any number of GPUs takes the same steps"
_LAUNCHED = (
    "in a script each GPU holds the whole model (DDP). Launch with a profile from accelerate_configs/; to split a "
    "model, train it by a configuration with training.strategy: shard"
)

# Field of SFTConfig -> (the values that are kept; why others are not, and what to do). A field not listed is kept.
_FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "loss_type": (("nll",), f"{_EXACT} keeps. Remove it"),
    "label_smoothing_factor": ((0, 0.0), f"{_EXACT} keeps. Remove it"),
    "average_tokens_across_devices": ((True,), f"{_EXACT} keeps. Remove it"),
    "liger_kernel_config": ((None, {}), "all of Liger's layer kernels are used, and its loss is not. Remove it"),
    "data_seed": ((None,), f"{_ORDER}. Set `seed`"),
    "train_sampling_strategy": (("random", "group_by_length"), f"{_ORDER}. Remove it"),
    "dataloader_drop_last": ((False,), "an epoch trains on every row once. Remove it"),
    "auto_find_batch_size": ((False,), "the batch would depend on the GPU. Set per_device_train_batch_size"),
    "fsdp": ((None, "", [], False), _LAUNCHED),
    "deepspeed": ((None, ""), _LAUNCHED),
    "parallelism_config": ((None,), _LAUNCHED),
    "push_to_hub": ((False,), "checkpoints are not pushed while training. Call trainer.push_to_hub() afterwards"),
}

# Attributes of Unsloth's own classes of arguments, which its UnslothTrainer reads: as in _FIELDS.
_OF_UNSLOTH: dict[str, tuple[tuple[Any, ...], str]] = {
    "embedding_learning_rate": ((None,), "all weights are trained with one learning rate. Remove it"),
    "loraplus_lr_ratio": ((None, 1, 1.0), "all weights are trained with one learning rate. Remove it"),
    "q_galore_config": ((None,), "this optimizer needs UnslothTrainer. Choose one by `optim`"),
    "context_parallel_size": ((None, 1), "each GPU computes whole rows. Remove it"),
}

# Constructor's arguments that must be None.
_ARGUMENTS = {
    "compute_loss_func": f"{_EXACT} keeps. Remove it, or train with trl.SFTTrainer",
    "compute_metrics": "evaluation does not build the logits it would get; it reports loss, token accuracy and entropy "
    "over all ranks. Remove it, and compute other metrics from the saved model",
    "preprocess_logits_for_metrics": "evaluation does not build logits. Remove it",
}

# Methods that a subclass must not override.
_METHODS = {
    "compute_loss": f"{_EXACT} keeps",
    "training_step": f"{_EXACT} keeps",
    "get_train_dataloader": _ORDER,
    "_get_train_sampler": _ORDER,
    "get_batch_samples": _ORDER,
}


class Refused(UserError, ValueError):
    """The constructor's arguments cannot be kept. A ValueError, as TRL raises for wrong arguments."""


def check(trainer: type, base: type, args: Any, given: Mapping[str, Any]) -> None:
    """Check a trainer's class and arguments.

    Args:
        trainer: the class that is constructed, `base` or a subclass of the user's.
        args: an SFTConfig.
        given: the constructor's arguments by name, `args` as the user gave it.

    Raises:
        Refused: names everything that is refused.
    """
    if given["train_dataset"] is None:
        raise Refused("`train_dataset` is required")
    problems = [
        *_methods(trainer, base),
        *_arguments(given),
        *_fields(args),
        *_arguments_of_unsloth(given["args"]),
        *_combinations(args, given),
    ]
    if len(problems) == 1:
        raise Refused(f"SFTTrainer: {problems[0]}")
    if problems:
        listed = "\n".join(f"  - {text}" for text in problems)
        raise Refused(f"SFTTrainer cannot keep {len(problems)} of its arguments:\n{listed}")


def _methods(trainer: type, base: type) -> Iterator[str]:
    for name, why in _METHODS.items():
        if getattr(trainer, name, None) is not getattr(base, name, None):
            yield f"{trainer.__name__} overrides `{name}`: {why}. Remove the method, or train with trl.SFTTrainer."


def _arguments(given: Mapping[str, Any]) -> Iterator[str]:
    for name, why in _ARGUMENTS.items():
        if given.get(name) is not None:
            yield f"`{name}`: {why}."


def _fields(args: Any) -> Iterator[str]:
    defaults = {one.name: one.default for one in dataclasses.fields(args)}
    for name, (kept, why) in _FIELDS.items():
        value = getattr(args, name, None)
        value = getattr(value, "value", value)  # of an enum
        if name in defaults and value not in kept and value != defaults[name]:
            yield f"`{name}={value!r}`: {why}."


def _arguments_of_unsloth(args: Any) -> Iterator[str]:
    for name, (kept, why) in _OF_UNSLOTH.items():
        value = getattr(args, name, None)
        if value not in kept:
            yield f"`{name}={value!r}`: {why}."


def _combinations(args: Any, given: Mapping[str, Any]) -> Iterator[str]:
    """As in TRL, whose words these are in part."""
    if args.packing and args.max_length is None:
        yield "`packing=True` needs `max_length`, the tokens of a pack. Set it."
    if args.packing and args.train_sampling_strategy == "group_by_length":
        yield "`packing=True` makes rows of one length, which cannot be grouped by length. Remove one of them."
    if args.padding_free and not args.packing and args.max_length is not None:
        yield (
            "`padding_free=True` without `packing`: TRL refuses it because `max_length` is not enforced there. Remove "
            "`padding_free`, which changes nothing in this trainer's results."
        )
    optim = str(getattr(args.optim, "value", args.optim))
    if (why := why_no_optimizer(optim, args.optim_target_modules)) is not None:
        yield f"`optim={optim!r}`: {why}"
    if given.get("formatting_func") is not None and args.completion_only_loss:
        yield (
            "`formatting_func` turns rows into text, which has no completion, and `completion_only_loss=True`. Remove "
            "one of them."
        )
    if given.get("data_collator") is not None and (args.packing or args.padding_free):
        yield "a custom `data_collator` cannot be used with `packing` or `padding_free`. Remove one of them."


def argument(split: str) -> str:
    """The constructor's argument that a split of the data was given as."""
    if split == "train":
        return "train_dataset"
    name = split.removeprefix("eval").removeprefix("_")
    return f"eval_dataset[{name!r}]" if name else "eval_dataset"


def datasets(given: Mapping[str, Any], args: Any) -> None:
    """Check the datasets of all splits, before anything is loaded.

    Raises:
        Refused: the first that cannot be used.
        TypeError: it is not a dataset.
    """
    prepared = bool((args.dataset_kwargs or {}).get("skip_prepare_dataset"))
    for split, rows in given.items():
        dataset(rows, argument(split), skips_preparation=prepared, assistant_only=args.assistant_only_loss)


def dataset(rows: Any, name: str, *, skips_preparation: bool, assistant_only: bool) -> None:
    """Check one dataset.

    Raises:
        Refused: it is missing, streamed, transformed on the fly, or has images.
    """
    import datasets

    if isinstance(rows, datasets.IterableDataset):
        raise Refused(
            f"`{name}` is an IterableDataset: its rows cannot be put into the order that makes any number of GPUs take "
            "the same steps. Load it without `streaming=True`, or write it with `Dataset.from_generator`."
        )
    if not isinstance(rows, datasets.Dataset):
        raise TypeError(f"`{name}` must be a `Dataset`, got `{type(rows).__name__}`.")
    if rows.format["type"] == "custom" and not skips_preparation:
        raise Refused(
            f"`{name}` uses `Dataset.with_transform()`, whose rows may differ on each reading. Make the transform "
            "permanent with `Dataset.map()`, or pass `dataset_kwargs={'skip_prepare_dataset': True}` with a transform "
            "that returns trainer-ready rows (input_ids and labels)."
        )
    first: Any = next(iter(rows), None)
    if first is None:
        raise Refused(f"`{name}` is empty. Give a dataset with rows.")
    if assistant_only and not skips_preparation and "input_ids" not in first and not _has_turns(first):
        raise Refused(
            f"`assistant_only_loss=True`, but the rows of `{name}` are not conversational: their columns are "
            f"{', '.join(rows.column_names)}. Remove it, or give messages."
        )
    pictures = sorted({"image", "images"} & set(rows.column_names))
    if pictures:
        raise Refused(
            f"`{name}` appears to be vision-related (it has the column {pictures[0]!r}), and this trainer trains on "
            "text. Use trl.SFTTrainer with a vision-language model."
        )
    masks = {"completion_mask", "assistant_masks"} & set(rows.column_names)
    if skips_preparation and masks and "labels" not in rows.column_names:
        raise Refused(
            f"`{name}` has the column {min(masks)!r} and `skip_prepare_dataset` leaves it unused, so the loss would be "
            "on every token. Add a 'labels' column (-100 for tokens without loss), or remove `skip_prepare_dataset`."
        )


def row_length(rows: Any, split: str, loaded: int | None) -> None:
    """Check rows that were tokenized elsewhere, and so are not cut, against the length that Unsloth loaded a model
    with: its layers would cut the ids, and not the labels.

    Raises:
        Refused: one is longer.
    """
    longest = int(rows.lengths.max(initial=0))
    if loaded is not None and longest > loaded:
        raise Refused(
            f"`{argument(split)}` has rows of up to {longest:,} tokens, and the model was loaded with "
            f"max_seq_length={loaded}. Load it with max_seq_length={longest}, or shorten the rows."
        )


def _has_turns(row: Mapping[str, Any]) -> bool:
    values = (row.get(name) for name in ("messages", "prompt", "conversations"))
    return any(isinstance(value, list) and value and isinstance(value[0], dict) for value in values)


def model(model: Any, peft_config: Any) -> None:
    """Check the model and its adapter.

    Raises:
        Refused: the model is spread over several devices, or the adapter is a prompt.
    """
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        raise Refused(
            f"the model is spread over {', '.join(sorted(devices))}: in this trainer each GPU holds the whole model. "
            "Remove `device_map`, or load with device_map={'': local rank}."
        )
    adapters = [peft_config, *(getattr(model, "peft_config", None) or {}).values()]
    for adapter in adapters:
        if getattr(adapter, "is_prompt_learning", False):
            raise Refused(
                f"the adapter is of the type {adapter.peft_type.value}: its virtual tokens are not in the plan of the "
                "data. Use LoRA, or train with trl.SFTTrainer."
            )


def values(*arguments: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Each object of training arguments, with the values of its fields now."""
    return [(one, _fields_of(one)) for one in arguments if dataclasses.is_dataclass(one)]


def _fields_of(arguments: Any) -> dict[str, Any]:
    return {field.name: getattr(arguments, field.name, None) for field in dataclasses.fields(arguments)}


def unchanged(trainer: Any, created_with: list[tuple[Any, dict[str, Any]]]) -> None:
    """Refuse arguments and methods that were changed after the trainer was created.

    Args:
        created_with: what `values` returned then.

    Raises:
        Refused: the plan and the batch were made with the former values.
    """
    changed = {name for one, former in created_with for name, now in _fields_of(one).items() if now != former[name]}
    changed |= vars(trainer).keys() & _METHODS.keys()
    if changed:
        names = ", ".join(sorted(changed))
        raise Refused(f"{names}: changed after the trainer was created. Set it before, in SFTConfig or SFTTrainer.")
