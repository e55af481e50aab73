"""Arguments that cannot be kept exactly on any number of GPUs: refused at construction, with the remedy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from finetune.config import Config, arguments, rules
from finetune.config.rules import AUTO, CHECKPOINTING, OFFLOAD, SELECTIVE, checkpointing_kinds, why_optimizer_unusable
from finetune.data.store import Rows
from finetune.errors import UserError, listed
from finetune.runtime.types import JsonObject, Model

if TYPE_CHECKING:
    import transformers
    import trl
    from _typeshed import DataclassInstance
    from datasets import Dataset
    from peft import PeftConfig

    Snapshot = tuple[DataclassInstance, JsonObject]  # an object and the values of its fields

_EXACT = (
    "the loss is the mean over the supervised tokens of the whole global batch, which only this trainer's code keeps"
)
_ORDER = "`seed` alone sets the order of the data, so that any number of GPUs takes the same steps"

# Methods that a subclass must not override.
_METHODS = {
    "compute_loss": _EXACT,
    "training_step": _EXACT,
    "get_train_dataloader": _ORDER,
    "_get_train_sampler": _ORDER,
    "get_batch_samples": _ORDER,
}


class Refused(UserError, ValueError):
    """The constructor's arguments cannot be kept. A ValueError, as TRL raises for wrong arguments."""


def check(trainer: type, base: type, args: trl.SFTConfig, given: JsonObject) -> None:
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
        *_arguments(SimpleNamespace(**given), arguments.TRAINER, dict.fromkeys(given)),
        *_arguments(args, arguments.CONFIG, {one.name: one.default for one in dataclasses.fields(args)}),
        *_arguments(given["args"], arguments.UNSLOTH, dict.fromkeys(arguments.rows(arguments.UNSLOTH))),
        *_combinations(args, given),
    ]
    if len(problems) == 1:
        raise Refused(f"SFTTrainer: {problems[0]}")
    if problems:
        listed = "\n".join(f"  - {text}" for text in problems)
        raise Refused(f"SFTTrainer cannot keep {len(problems)} of its arguments:\n{listed}")


def check_launch(of: str, given: JsonObject) -> None:
    """Refuse DeepSpeed and FSDP, whose packages transformers looks for, before its arguments (of a class) are made."""
    names: dict[str, Any | None] = dict.fromkeys(("deepspeed", "fsdp", "parallelism_config"))
    for problem in _arguments(SimpleNamespace(**given), arguments.CONFIG, names):
        raise Refused(f"{of}: {problem}")


def _methods(trainer: type, base: type) -> Iterator[str]:
    for name, why in _METHODS.items():
        if getattr(trainer, name, None) is not getattr(base, name, None):
            yield f"{trainer.__name__} overrides `{name}`: {why}. Remove the method, or train with trl.SFTTrainer."


def _arguments(args: object, of: str, defaults: Mapping[str, object]) -> Iterator[str]:
    """The arguments of a class whose values a script cannot keep.

    Args:
        args: has them as attributes.
        defaults: of those that it has.
    """
    for name, row in arguments.rows(of).items():
        value = getattr(args, name, None)
        value = getattr(value, "value", value)  # of an enum
        if row.script and name in defaults and value not in row.kept and value != defaults[name]:
            given = "" if of == arguments.TRAINER else f"={value!r}"
            yield f"`{name}{given}`: {'. '.join(text for text in (row.reason, row.script) if text)}."


def _combinations(args: trl.SFTConfig, given: JsonObject) -> Iterator[str]:
    """As in TRL, whose words these are in part."""
    if args.packing and args.max_length is None:
        yield "`packing=True` needs `max_length`, the tokens of a pack. Set it."
    if args.packing and args.train_sampling_strategy == "group_by_length":
        yield "`packing=True` makes rows of one length, which cannot be grouped by length. Remove one of them."
    yield from _checkpointing(args)
    optim = str(getattr(args.optim, "value", args.optim))
    if (why := why_optimizer_unusable(optim, args.optim_target_modules)) is not None:
        yield f"`optim={optim!r}`: {why}"
    if given.get("formatting_func") is not None and args.completion_only_loss:
        yield (
            "`formatting_func` turns rows into text, which has no completion, and `completion_only_loss=True`. Remove "
            "one of them."
        )
    if given.get("data_collator") is not None and (args.packing or args.padding_free):
        yield "a custom `data_collator` cannot be used with `packing` or `padding_free`. Remove one of them."


def _checkpointing(args: trl.SFTConfig) -> Iterator[str]:
    """The kind of recomputation, which SFTConfig takes as it is, and the arguments that choose or change it."""
    kind: Any = args.gradient_checkpointing
    kinds = list(dict.fromkeys([*checkpointing_kinds("transformers"), *checkpointing_kinds("unsloth"), AUTO]))
    if kind not in kinds:
        yield f"`gradient_checkpointing={kind!r}`: expected one of {', '.join(map(repr, kinds))}."
        return
    if args.activation_offloading and not kind:
        yield (
            "`activation_offloading=True` without `gradient_checkpointing`: what is moved to CPU memory here is what "
            "checkpointing keeps. Set `gradient_checkpointing=True`, or remove `activation_offloading`."
        )
    given: Any = args.gradient_checkpointing_kwargs or {}
    known = (*CHECKPOINTING, "context_fn", "determinism_check", "every_n_layers", OFFLOAD, SELECTIVE)
    for name in given:
        if name not in known:
            yield f"`gradient_checkpointing_kwargs` has {name!r}, and takes {', '.join(known)}. Remove it."
    asked = [(kind, f"`gradient_checkpointing={kind!r}`")] if isinstance(kind, str) else []
    if kind:
        asked += [(OFFLOAD, "`activation_offloading=True`")] * bool(args.activation_offloading)
        asked += [
            (one, f"`{one}` in `gradient_checkpointing_kwargs`") for one in (OFFLOAD, SELECTIVE) if given.get(one)
        ]
    if len({one for one, _ in asked}) > 1:
        both = " and ".join(text for _, text in asked)
        yield f"{both} are different ways to keep activations. Remove all but one."
    elif asked and asked[0][0] != "unsloth" and given.get("use_reentrant"):
        yield f"{asked[0][1]} needs `use_reentrant=False`. Remove `use_reentrant` from `gradient_checkpointing_kwargs`."
    elif asked and asked[0][0] in (SELECTIVE, AUTO) and given.get("context_fn"):
        yield f"{asked[0][1]} sets `context_fn` itself. Remove it from `gradient_checkpointing_kwargs`."


def argument_name(split: str) -> str:
    """The constructor's argument that a split of the data was given as."""
    if split == "train":
        return "train_dataset"
    name = split.removeprefix("eval").removeprefix("_")
    return f"eval_dataset[{name!r}]" if name else "eval_dataset"


def check_dataset(rows: object, name: str, *, skips_preparation: bool, assistant_only: bool) -> Dataset:
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
        made = "`Dataset.from_list([rows[n] for n in range(len(rows))])`"  # also of a torch Dataset
        raise TypeError(f"`{name}` must be a `Dataset` of datasets, got `{type(rows).__name__}`. Give it {made}.")
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
            f"{listed(rows.column_names)}. Remove it, or give messages."
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
    return rows


def check_row_length(rows: Rows, split: str, loaded: int | None) -> None:
    """Check rows that were tokenized elsewhere, and so are not cut, against the length that Unsloth loaded a model
    with: its layers would cut the ids, and not the labels.

    Raises:
        Refused: one is longer.
    """
    longest = int(rows.lengths.max(initial=0))
    if loaded is not None and longest > loaded:
        raise Refused(
            f"`{argument_name(split)}` has rows of up to {longest:,} tokens, and the model was loaded with "
            f"max_seq_length={loaded}. Load it with max_seq_length={longest}, or shorten the rows."
        )


def _has_turns(row: Mapping[str, object]) -> bool:
    values = (row.get(name) for name in ("messages", "prompt", "conversations"))
    return any(isinstance(value, list) and value and isinstance(value[0], dict) for value in values)


def check_model(model: Model, peft_config: PeftConfig | None, args: trl.SFTConfig) -> None:
    """Check the model and its adapter.

    Raises:
        Refused: this trainer cannot train the model, or not with this adapter.
    """
    if (kind := type(getattr(model, "get_base_model", lambda: model)()).__name__).endswith("Classification"):
        raise Refused(f"{kind} has no head for text. Load AutoModelForCausalLM, or train with transformers.Trainer.")
    if len(devices := {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}) > 1:
        raise Refused(
            f"the model is spread over {', '.join(sorted(devices))}: in this trainer each GPU holds the whole model. "
            "Remove `device_map`, or load with device_map={'': local rank}."
        )
    held = getattr(model, "peft_config", None) or {}
    if held and not hasattr(model, "get_base_model"):
        raise Refused(
            "the model holds an adapter that was put into it; saved from this model, nothing could load it. Give "
            "SFTTrainer what `get_peft_model` or `PeftModel.from_pretrained(model, folder, is_trainable=True)` returns."
        )
    adapters = [peft_config, *held.values()]
    trains_quantized = getattr(getattr(model, "hf_quantizer", None), "is_qat_trainable", False)
    if getattr(model, "is_quantized", False) and not trains_quantized and adapters == [None]:
        raise Refused("the model is quantized and has no adapter to train. Give SFTTrainer a `peft_config`.")
    for adapter in adapters:
        if getattr(adapter, "is_prompt_learning", False):
            raise Refused(
                f"the adapter is of the type {adapter.peft_type.value}: its virtual tokens are not in the plan of the "
                "data. Use LoRA, or train with trl.SFTTrainer."
            )
        if args.packing and getattr(adapter, "alora_invocation_tokens", None):
            raise Refused("`alora_invocation_tokens` needs rows of one document each. Remove it, or `packing=True`.")


def check_shared_rows(config: Config) -> None:
    """Refuse what ranks that share each row cannot have.

    Raises:
        Refused: with all that is found.
    """
    key = "training.context_parallel"
    all_rules = (rules.transformers_only, rules.context_parallelism)
    if found := [text for rule in all_rules for about, text in rule(config, config.given) if key in about]:
        raise Refused(f"`context_parallel={config.training.context_parallel}`: {' '.join(found)}")


def snapshot(*given: object) -> list[Snapshot]:
    """Each object of training arguments, with the values of its fields now."""
    return [(one, _fields_of(one)) for one in given if dataclasses.is_dataclass(one) and not isinstance(one, type)]


def _fields_of(args: DataclassInstance) -> JsonObject:
    return {field.name: getattr(args, field.name, None) for field in dataclasses.fields(args)}


def check_unchanged(trainer: transformers.Trainer, created_with: list[Snapshot]) -> None:
    """Refuse arguments and methods that were changed after the trainer was created.

    Args:
        created_with: what `snapshot` returned then.

    Raises:
        Refused: the plan and the batch were made with the former values.
    """
    changed = {name for one, former in created_with for name, now in _fields_of(one).items() if now != former[name]}
    changed |= vars(trainer).keys() & _METHODS.keys()
    changed |= {"args"} if trainer.args is not created_with[-1][0] else set()
    if changed:
        names = ", ".join(sorted(changed))
        raise Refused(f"{names}: changed after the trainer was created. Set it before, in SFTConfig or SFTTrainer.")
