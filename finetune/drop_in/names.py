"""The arguments of a script instead of the keys of a configuration, in the messages that both doors share."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator

import trl

from finetune.errors import UserError

_KEY = re.compile(
    r"(?<!--finetune )\b(model|lora|data|training|logging)\.([a-z_0-9]+)(?:: (true|false|null|[0-9.]+)\b)?"
)
# Options of `finetune.train` that go on from a checkpoint.
_FURTHER = re.compile(
    r"the same command with --training\.(\w+) (\S+) "
    r"--training\.resume_from_checkpoint true --training\.resume_with_changes true"
)
_VALUES = {"true": "True", "false": "False", "null": "None"}
# What is called otherwise in a script. Names of SFTConfig and LoraConfig stay.
_CALLED = {
    "data.eval_file or data.eval_fraction": "eval_dataset",
    "data.eval_file": "eval_dataset",
    "data.columns and data.format": "the columns of the rows",
    "data.columns": "the columns of the rows",
    "data.response_part": "the labels",
    "data.num_proc": "dataset_num_proc",
    "data.over_length: split": "packing_strategy='bfd_split'",
    "model.chat_template": "tokenizer.chat_template",
    "model.model_name_or_path": "model",
    "training.resume_with_changes: true": "train(resume_with_changes=True)",
    "training.strategy: shard on several GPUs": "--finetune training.strategy=shard on several GPUs",
}


@contextlib.contextmanager
def script_names() -> Iterator[None]:
    """Context in which the message of a UserError names a script's arguments."""
    try:
        yield
    except UserError as error:
        error.args = (with_script_names(str(error)), *error.args[1:])
        raise


def with_script_names(text: str) -> str:
    """A message with the names of a script's arguments: `training.seed` is `seed`."""
    text = _FURTHER.sub(r"\1=\2, train(resume_from_checkpoint=True, resume_with_changes=True)", text)
    for key, called in _CALLED.items():
        text = re.sub(rf"\b{re.escape(key)}(?!\w)", called, text)
    arguments = {one.name for one in dataclasses.fields(trl.SFTConfig)} | {"global_batch_size", "context_parallel"}

    def name(found: re.Match[str]) -> str:
        section, key, value = found.groups()
        if section in ("training", "data", "logging") and key not in arguments or key == "strategy":
            return found[0]
        called = f"LoraConfig's {key}" if section == "lora" else key
        return called if value is None else f"{called}={_VALUES.get(value, value)}"

    return _KEY.sub(name, text)
