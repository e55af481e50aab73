"""The fields of TRL's SFTConfig and PEFT's LoraConfig, read from their sources: importing them would import torch,
which takes seconds."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Optional, Union

from finetune.config.values import Values
from finetune.errors import UserError

# Package, file and class, from the base to SFTConfig: a later class overrides an earlier one.
_CLASSES = (
    ("transformers", "training_args.py", "TrainingArguments"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("trl", "trainer/sft_config.py", "SFTConfig"),
)
# Names that mean the same in those files as here. An annotation with any other name accepts every value: SFTConfig
# itself then checks it.
_NAMES = {"int": int, "float": float, "bool": bool, "str": str, "list": list, "dict": dict, "Any": Any}
_NAMES |= {"Literal": Literal, "Optional": Optional, "Union": Union, "tuple": list}  # YAML has no tuples
# Fields that take less than their annotation says: what a wrong value does to them comes late and without their name.
_NARROWED: Values = {
    "debug": Literal["underflow_overflow"] | None,
    "include_num_input_tokens_seen": Literal["all", "non_padding", "no"] | bool,
    "log_level_replica": Literal["debug", "info", "warning", "error", "critical", "passive"],
    "dataloader_multiprocessing_context": Literal["fork", "spawn", "forkserver"] | None,
    "gradient_checkpointing_kwargs": dict[str, bool] | None,
    "lr_scheduler_kwargs": Values | None,
}

# Keys of ours and the enum behind each: SFTConfig refuses any value that is not in it.
CHOICES = {
    "optim": ("training_args.py", "OptimizerNames"),
    "lr_scheduler_type": ("trainer_utils.py", "SchedulerType"),
}


@cache
def sft_fields() -> Values:
    """Name -> annotation of every SFTConfig field, `typing.Any` if the annotation is not a simple one.

    Raises UserError if trl or transformers is not installed, or lacks these classes.
    """
    found: Values = {}
    for package, file, name in _CLASSES:
        for statement in _class_body(package, file, name):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                found[statement.target.id] = _annotation(statement.annotation)
    return found | {name: one for name, one in _NARROWED.items() if name in found}


@cache
def lora_fields() -> Values:
    """The same of PEFT's LoraConfig."""
    body = _class_body("peft", "tuners/lora/config.py", "LoraConfig")
    fields = [one for one in body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
    found = {one.target.id: _annotation(one.annotation) for one in fields if isinstance(one.target, ast.Name)}
    # PEFT takes more than the first annotation says, and less than the second.
    return found | {"init_lora_weights": bool | str, "rank_pattern": dict[str, int] | None}


@cache
def choices(name: str) -> tuple[str, ...]:
    """The values that SFTConfig allows for one of the names in CHOICES."""
    body = _class_body("transformers", *CHOICES[name])
    values = (item.value for item in body if isinstance(item, ast.Assign))
    return tuple(value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str))


def _class_body(package: str, file: str, name: str) -> list[ast.stmt]:
    spec = find_spec(package)  # finds a top-level package without importing it
    if spec is None or spec.origin is None:
        raise UserError(f"{package} is not installed. Install this project with its dependencies: pip install -e .")
    path = Path(spec.origin).parent / file
    if path.is_file():
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.ClassDef) and statement.name == name:
                return statement.body
    raise UserError(f"the installed {package} has no class {name} in {path}. Install the version in constraints.txt.")


def _annotation(node: ast.expr) -> object:
    try:
        # Nothing is trusted here that is not trusted anyway: the same file is imported when training starts.
        return eval(ast.unparse(node), {"__builtins__": {}}, _NAMES)
    except (NameError, TypeError):
        return Any
