"""What older scripts and Unsloth's examples give to SFTConfig and SFTTrainer, decided by its values."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
import trl

from finetune.config.arguments import TRAINER, row, with_current_names
from finetune.drop_in import backbone
from finetune.drop_in.overrides import Overrides
from finetune.drop_in.refusals import Refused, check_launch
from finetune.runtime.command import print_line
from finetune.runtime.types import JsonObject, Model, Tokenizer

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftConfig


class SFTConfig(trl.SFTConfig):
    """`trl.SFTConfig`, which also takes the former names of its arguments and prints what they are today.

    Args:
        context_parallel: GPUs that share each row, for rows too long for one.
    """

    def __init__(self, *positional: Any, context_parallel: int = 1, **given: Any) -> None:
        if type(context_parallel) is not int or context_parallel < 1:
            raise Refused(f"SFTConfig: `context_parallel={context_parallel!r}`: expected a whole number, at least 1.")
        self.context_parallel = context_parallel
        if given.get("packing") and given.pop("group_by_length", False):
            print_line("SFTConfig: `group_by_length` is left out: packs have one length.")
        todays_names = _todays_names("SFTConfig", given)
        super().__init__(*positional, **todays_names)
        by_position = [one.name for one in dataclasses.fields(trl.SFTConfig)][: len(positional)]
        # Unlike 8 rows, the default, a size that is given is kept.
        self.size_given = "per_device_train_batch_size" in {*by_position, *todays_names}
        # Unlike `max_length=1024`, TRL's default, this is the user's choice, whatever its value.
        self.length_given = given.get("max_seq_length") is not None

    def __getattr__(self, name: str) -> Any:
        return _by_former_name(self, name)


class TrainingArguments(transformers.TrainingArguments):
    """`transformers.TrainingArguments`, which also takes the former names of its arguments. SFTTrainer completes them
    to an SFTConfig with their values, as TRL's does."""

    def __init__(self, *positional: Any, **given: Any) -> None:
        super().__init__(*positional, **_todays_names("TrainingArguments", given))

    def __getattr__(self, name: str) -> Any:
        return _by_former_name(self, name)


def _todays_names(of: str, given: JsonObject) -> JsonObject:
    check_launch(of, given)
    return with_current_names(given, note=lambda text: print_line(f"{of}: {text}."))


def _by_former_name(args: object, name: str) -> Any:
    """The value that a former name has today: `args.max_seq_length`."""
    one = row(name)
    if not one.now:
        raise AttributeError(f"{type(args).__name__!r} object has no attribute {name!r}")
    value = getattr(args, one.now)
    return next((old for old, (_, today) in one.sets.items() if today == value), value)


# Their signatures, by which a script may choose an argument's name.
functools.update_wrapper(SFTConfig.__init__, trl.SFTConfig.__init__)
functools.update_wrapper(TrainingArguments.__init__, transformers.TrainingArguments.__init__)


def complete_arguments(
    args: transformers.TrainingArguments | None, model: Model | str, former: JsonObject, overrides: Overrides
) -> trl.SFTConfig:
    """A copy of the user's SFTConfig, in TRL's way of filling in what is missing.

    Args:
        args: an SFTConfig, plain TrainingArguments, or None.
        former: constructor's arguments of older versions of TRL, which Unsloth still accepts; emptied.
        overrides: of the command line, which change the user's SFTConfig itself.

    Raises:
        TypeError: `former` has names that never were arguments.
    """
    if args is None:
        name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "") or "model"
        folder = f"{name.rstrip('/').split('/')[-1]}-SFT"
        args = SFTConfig(_UNSLOTH_FOLDER if backbone.loaded_by_unsloth(model) else folder)
    elif not isinstance(args, trl.SFTConfig):
        args = trl.SFTConfig(**{**args.to_dict(), "hub_token": args.hub_token})
    overrides.set_arguments(args)
    options: Any = args.dataset_kwargs or former.get("dataset_kwargs") or {}
    for name in sorted(options.keys() - {"skip_prepare_dataset"}):
        print_line(f"SFTTrainer: `{name}` in `dataset_kwargs` has no effect: TRL ignores it since 0.13.")
    args = copy.copy(args)
    if type(args) is SFTConfig:
        args.__class__ = trl.SFTConfig  # type: ignore[assignment]  # training_args.bin needs no package of ours
    if (shared := overrides.get("training.context_parallel", None)) is not None:
        args.context_parallel = shared  # type: ignore[attr-defined]
    # Unsloth's SFTConfig has a field for the length of rows, in addition to TRL's.
    length = former.pop("max_seq_length", None) or getattr(args, "max_seq_length", None)
    if length is None and getattr(args, "length_given", False):
        length = args.max_length
    for name in [name for name in former if row(name, TRAINER).moved or row(name, TRAINER).now is not None]:
        value = former.pop(name)
        if value is not None and row(name, TRAINER).moved:
            setattr(args, name, value)
            print_line(f"SFTTrainer: `{name}` is an argument of SFTConfig now.")
            if name == "packing" and value and args.train_sampling_strategy == "group_by_length":
                args.train_sampling_strategy = "random"  # by its former name, which packs ignored
    if former:
        raise TypeError(f"SFTTrainer() got an unexpected keyword argument {min(former)!r}")
    _set_row_length(args, length, backbone.loaded_length(model))
    return args


_UNSLOTH_FOLDER = "unsloth_training_checkpoints"  # the default output_dir of its SFTConfig


@dataclass(frozen=True, kw_only=True)
class RowReader:
    """Which text of a row is read, as the versions did that the script was written for.

    formatting_func: the user's; None reads the columns
    text_field:      the column of text, by SFTConfig's dataset_text_field
    text_only:       no other column, because it was given to the trainer, as to TRL before 0.13
    text_first:      before messages and formatting_func, as with Unsloth's trainer
    hides_pairs:     formatting_func's text instead of prompt and completion, as in TRL before 0.15; TRL fails on the
                     two today unless `completion_only_loss` is set
    """

    formatting_func: Callable[..., object] | None
    text_field: str
    text_only: bool
    text_first: bool
    hides_pairs: bool = False

    def column(self, columns: list[str]) -> str | None:
        """The one column that is read of rows with these columns; None for TRL's own order."""
        others = {"messages", "conversations", "prompt"} & set(columns)
        if self.text_field not in columns or not (others or self.formatting_func):
            return None
        pairs = {"prompt", "completion"} <= set(columns)
        return self.text_field if self.text_only or self.text_first and not pairs else None

    @property
    def why(self) -> str:
        """Why `column` is the only one."""
        return "as given to the trainer" if self.text_only else "which Unsloth's trainer takes first"

    def takes_batches(self, rows: Dataset) -> bool:
        """Whether formatting_func gets columns of several rows and returns their texts, as in TRL before 0.20."""
        if self.formatting_func is None:
            return False
        try:
            if isinstance(self.formatting_func(rows[0]), str):
                return False
        except Exception:  # of a function that takes batches, with one row; else reading the rows reports it
            pass
        try:
            texts = self.formatting_func(rows[:2])
        except Exception:
            return False
        return isinstance(texts, list) and all(isinstance(text, str) for text in texts)


def row_reader(
    args: trl.SFTConfig, model: Model | str, formatting_func: Callable[..., object] | None, given_field: object
) -> RowReader:
    """How the rows of a trainer are read.

    Args:
        args: the completed SFTConfig.
        given_field: the trainer's own `dataset_text_field`, if it was given.
    """
    packs = args.packing and formatting_func is not None  # which took the function, not the field
    return RowReader(
        formatting_func=formatting_func,
        text_field=args.dataset_text_field,
        text_only=bool(given_field) and not packs,
        text_first=backbone.loaded_by_unsloth(model) and not args.assistant_only_loss,
        hides_pairs=args.completion_only_loss is None,
    )


def adapter_to_add(model: Model, peft_config: PeftConfig | None) -> PeftConfig | None:
    """The adapter that a trainer adds to a model: None for one that has this very adapter, by get_peft_model. TRL
    refuses the two together since 0.20, and ignored `peft_config` before."""
    held = getattr(model, "peft_config", None) or {}
    if peft_config is None or not any(_same_adapter(peft_config, one) for one in held.values()):
        return peft_config
    print_line("SFTTrainer: `peft_config` is left out: the model has this adapter by get_peft_model.")
    return None


def _same_adapter(one: PeftConfig, two: PeftConfig) -> bool:
    """Whether two configurations make the same adapter. A model's own has its targets as a set, and its base's name."""
    first, second = one.to_dict(), two.to_dict()
    for each in (first, second):
        targets = each.get("target_modules")
        each["target_modules"] = sorted(targets) if isinstance(targets, set | list | tuple) else targets
        each.pop("base_model_name_or_path", None)
    if first["target_modules"] is None:  # PEFT has chosen them by the architecture
        first["target_modules"] = second["target_modules"]
    return first == second


def _set_row_length(args: trl.SFTConfig, given: int | None, loaded: int | None) -> None:
    """Set `max_length` as Unsloth's trainer does: to the length the model was loaded with, unless the script gives a
    shorter one. TRL's default counts as none given.

    Args:
        given: `max_seq_length` of the trainer or of SFTConfig.
        loaded: `max_seq_length` of Unsloth's loader.
    """
    if given is not None:
        args.max_length = given
    if loaded is None:
        return
    asked = args.max_length
    default = next(one.default for one in dataclasses.fields(trl.SFTConfig) if one.name == "max_length")
    own = bool(asked) and (given is not None or asked != default)
    args.max_length = min(asked or loaded, loaded) if own else loaded
    if args.max_length == asked:
        return
    why = f"not {asked:,}" if own else "as with Unsloth's own trainer; another max_length makes them shorter"
    print_line(f"Rows have up to {loaded:,} tokens, the max_seq_length that the model was loaded with ({why}).")


# --- what TRL has removed ---------------------------------------------------------------------------------------------


class DataCollatorForCompletionOnlyLM:
    """Loss on what follows `response_template`, as TRL's former collator of this name. With `instruction_template`,
    on what follows each response template up to the next instruction.

    Args:
        response_template: text or token ids before a response. Of several, the last one counts.
        instruction_template: text or token ids before an instruction.
        tokenizer: the one that the rows are tokenized with.
        mlm: ignored, as in TRL's.
        ignore_index: label of the tokens without loss.
    """

    def __init__(
        self,
        response_template: str | list[int],
        instruction_template: str | list[int] | None = None,
        *,
        tokenizer: Tokenizer,
        mlm: bool = False,
        ignore_index: int = -100,
    ) -> None:
        def tokens(template: str | list[int]) -> list[int]:
            return tokenizer.encode(template, add_special_tokens=False) if isinstance(template, str) else list(template)

        self.response = tokens(response_template)
        self.instruction = None if instruction_template is None else tokens(instruction_template)
        self.pad_token_id, self.ignore_index = tokenizer.pad_token_id, ignore_index

    def __call__(self, rows: list[JsonObject]) -> dict[str, torch.Tensor]:
        ids = [list(row["input_ids"]) for row in rows]
        longest = max(map(len, ids))
        padded = [one + [self.pad_token_id] * (longest - len(one)) for one in ids]
        labels = [self._labels(one) + [self.ignore_index] * (longest - len(one)) for one in ids]
        masks = [[1] * len(one) + [0] * (longest - len(one)) for one in ids]
        named = {"input_ids": padded, "attention_mask": masks, "labels": labels}
        return {name: torch.tensor(values) for name, values in named.items()}

    def _labels(self, ids: list[int]) -> list[int]:
        responses = self._ends(ids, self.response)
        if not responses:
            return [self.ignore_index] * len(ids)
        spans = [(responses[-1], len(ids))]
        if self.instruction is not None:
            starts = [end - len(self.instruction) for end in self._ends(ids, self.instruction)]
            ends = [min([at for at in starts if at >= end], default=len(ids)) for end in responses]
            spans = list(zip(responses, ends, strict=True)) if starts else []
        kept = {number for start, end in spans for number in range(start, end)}
        padding = self.pad_token_id
        return [one if n in kept and one != padding else self.ignore_index for n, one in enumerate(ids)]

    @staticmethod
    def _ends(ids: list[int], part: list[int]) -> list[int]:
        size = len(part)
        return [at + size for at in range(len(ids) - size + 1) if ids[at : at + size] == part]


def setup_chat_format(
    model: transformers.PreTrainedModel,
    tokenizer: Tokenizer,
    format: str = "chatml",
    resize_to_multiple_of: int | None = None,
) -> tuple[transformers.PreTrainedModel, Tokenizer]:
    """The ChatML template with its two tokens, and embeddings for them, as TRL's former function of this name.

    Args:
        resize_to_multiple_of: pad the embeddings to a multiple of this many rows.

    Returns:
        The model and the tokenizer.

    Raises:
        ValueError: another format is asked for, or the tokenizer has a template.
    """
    if format != "chatml":
        raise ValueError(f"unknown format: {format}. Only chatml is known.")
    if tokenizer.chat_template is not None:
        raise ValueError("the tokenizer has a chat template. Remove the call of setup_chat_format.")
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|im_end|>"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content']"
        " + '<|im_end|>' + '\\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=resize_to_multiple_of)
    for config in (model.config, model.generation_config):
        config.pad_token_id, config.bos_token_id = tokenizer.pad_token_id, tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer
