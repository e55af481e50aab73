"""A notebook's training arguments as its trace shows them, and the settings that they become.

The values come from the trace, not from the source, so variables, `**settings` and arithmetic are already resolved.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from finetune.config.arguments import CONFIG, TRAINER, former, rows
from finetune.convert.knowledge import DEFAULTS
from finetune.convert.read import Refusal
from finetune.convert.roles import event_of
from finetune.convert.trace import Trace

ADAPTER_ARGUMENTS = {
    "unsloth": ("r", "target_modules", "lora_alpha", "lora_dropout", "bias"),
    "peft": (
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "r",
    ),
}
UNCUT = -1  # stands for SFTConfig(max_length=None), which truncates nothing; None there means that it is not set


@dataclass(kw_only=True)
class Settings:
    """Sections of the YAML file, comments by dotted name, and notes for the report."""

    sections: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {n: {} for n in ("model", "lora", "data", "training", "logging")}
    )
    comments: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def set(self, name: str, value: Any, comment: str = "") -> None:
        section, key = name.split(".", 1)
        self.sections[section][key] = value
        if comment:
            self.comments[name] = comment


class Unknown:
    """A value that is only known at run time."""

    def __init__(self, item: dict[str, Any]):
        self.item = item
        self.name = str(item.get("name") or "")

    def __str__(self) -> str:
        return str(self.item.get("sym") or self.item.get("text") or self.item.get("other") or self.item)

    __repr__ = __str__


def known(value: Any) -> Any:
    """A traced value in Python, with Unknown for symbols."""
    if isinstance(value, list):
        return [known(item) for item in value]
    if isinstance(value, dict):
        if "dict" in value and len(value) == 1:
            return {known(key) if not isinstance(key, dict) else str(key): known(item) for key, item in value["dict"]}
        if "tuple" in value and len(value) == 1:
            return tuple(known(item) for item in value["tuple"])
        if "set" in value and len(value) == 1:
            return [known(item) for item in value["set"]]
        return Unknown(value)
    return value


def has_unknown(value: Any) -> bool:
    if isinstance(value, Unknown):
        return True
    if isinstance(value, dict):
        return any(has_unknown(item) for item in value.values())
    return isinstance(value, list | tuple) and any(has_unknown(item) for item in value)


@dataclass(frozen=True, kw_only=True)
class Described:
    """A notebook's training arguments, by their names in its libraries."""

    api: str  # unsloth or transformers
    owner: str
    loader: dict[str, Any]
    adapter: dict[str, Any] | None
    adapter_kind: str  # unsloth or peft
    trainer: dict[str, Any]
    config: dict[str, Any]
    config_name: str
    responses: dict[str, Any] | None
    former_text_field: bool  # dataset_text_field is the trainer's own argument, as in TRL before 0.13
    checkpoints: bool  # activation recomputation is enabled on the model, independent of the trainer's arguments
    train: dict[str, Any]


def described(trace: Trace) -> Described:
    """Read the events of a notebook's trace."""
    load = event_of(trace, "load")
    trainer_event = event_of(trace, "trainer")
    assert load is not None and trainer_event is not None
    owner, args, kwargs = load["detail"]
    names = (
        "model_name",
        "max_seq_length",
        "dtype",
        "load_in_4bit",
        "load_in_8bit",
        "load_in_16bit",
        "full_finetuning",
        "token",
        "device_map",
    )
    api = load["api"]
    if api == "transformers":
        names = ("model_name",)
    loader = dict(zip(names, known(args), strict=False)) | known(kwargs)
    if "pretrained_model_name_or_path" in loader:
        loader["model_name"] = loader.pop("pretrained_model_name_or_path")
    trainer = _with_todays_names(TRAINER, known(trainer_event["detail"]))
    config, config_name = _arguments(trainer.get("args"), api)
    moved = {key: trainer.pop(key) for key, row in rows(TRAINER).items() if row.moved and key in trainer}
    moved = _with_todays_names(CONFIG, moved)
    given_to_trainer = {key: value for key, value in moved.items() if value is not None and config.get(key) is None}
    config |= given_to_trainer
    adapter, kind = _adapter(trace, trainer, api)
    responses = event_of(trace, "responses")
    train = event_of(trace, "train")
    given = known(train["detail"][1]) if train and isinstance(train["detail"][1], dict) else {}
    if train and isinstance(train["detail"][1], list):
        given = {item[0]: item[1] for item in train["detail"][1][1:]}
        if len(train["detail"][0]) > 1:
            given["resume_from_checkpoint"] = train["detail"][0][1]
    return Described(
        api=api,
        owner=owner,
        loader=loader,
        adapter=adapter,
        adapter_kind=kind,
        trainer=trainer,
        config=config,
        config_name=config_name,
        responses=known(responses["detail"]) if responses else None,
        former_text_field="dataset_text_field" in given_to_trainer,
        checkpoints=_checkpoints(trace),
        train=given,
    )


def _checkpoints(trace: Trace) -> bool:
    """PEFT's prepare_model_for_kbit_training enables gradient checkpointing by default."""
    kbit = event_of(trace, "kbit")
    if kbit is not None and known(kbit["detail"]).get("use_gradient_checkpointing", True) is not False:
        return True
    return any(item.get("method") == "gradient_checkpointing_enable" for item in trace["events"])


def _arguments(given: Any, api: str) -> tuple[dict[str, Any], str]:
    if given is None:
        return {}, "SFTConfig"
    if not isinstance(given, Unknown) or "kwargs" not in given.item:
        raise Refusal("R4", f"the trainer's arguments are only known at run time ({given}); use an SFTConfig")
    name = given.name.rsplit(".", 1)[-1]
    if name not in ("SFTConfig", "TrainingArguments", "UnslothTrainingArguments"):
        raise Refusal("R4", f"the trainer's arguments must be an SFTConfig, got {name}")
    kwargs = known(given.item["kwargs"])
    args = known(given.item["args"])
    if args:
        kwargs["output_dir"] = args[0]
    if api == "transformers" and "max_length" in kwargs and kwargs["max_length"] is None:
        kwargs["max_length"] = UNCUT
    return _with_todays_names(CONFIG, kwargs), name


def _with_todays_names(owner: str, given: dict[Any, Any]) -> dict[str, Any]:
    """The arguments under the names they have now. If the notebook gives both names, today's wins, unless it is unset:
    `warmup_steps=0` beside a `warmup_ratio`."""
    new = {name: now for name, now in former(owner).items() if now}
    old = {new[str(key)]: value for key, value in given.items() if str(key) in new}
    today = {str(key): value for key, value in given.items() if str(key) not in new}
    return old | {key: value for key, value in today.items() if key not in old or value not in (None, 0)}


def _adapter(trace: Trace, trainer: dict[str, Any], api: str) -> tuple[dict[str, Any] | None, str]:
    adapt = event_of(trace, "adapt")
    if adapt is not None:
        name, args, kwargs = adapt["detail"]
        given = known(kwargs)
        if str(name).startswith("unsloth."):
            return dict(zip(ADAPTER_ARGUMENTS["unsloth"], known(args), strict=False)) | given, "unsloth"
        config = (*known(args), given.get("peft_config"))[0]
        if given.get("autocast_adapter_dtype") is False:
            raise Refusal("R4", "autocast_adapter_dtype=False is not supported: the adapter is trained in float32")
        return _lora_config(config, trace), "peft"
    if trainer.get("peft_config") is not None:
        return _lora_config(trainer["peft_config"], trace), "peft"
    return None, "unsloth" if api == "unsloth" else "peft"


def _lora_config(value: Any, trace: Trace) -> dict[str, Any]:
    if isinstance(value, Unknown) and value.name.rsplit(".", 1)[-1] == "LoraConfig":
        given = known(value.item["kwargs"])
        targets = given.get("target_modules")
        if has_unknown(targets) and "named_modules()" in str(targets):
            _refuse_chosen(trace)
            given["target_modules"] = "all-linear"  # `find_all_linear_names(model)`: all except the head
        return given
    raise Refusal("R4", f"the adapter must be a LoraConfig, got {value}")


def _refuse_chosen(trace: Trace) -> None:
    """Refuse targets that are computed from the model's modules by more than their type."""
    asked = [one["words"] for one in trace["decisions"].values() if "named_modules()" in one["words"]]
    linear = [text for text in asked if re.match(r"isinstance\(.*\b\w*Linear\w*\b", text)]
    others = [text for text in asked if text not in linear and not re.search(r"lm_head|^\(len\(", text)]
    if not linear or others:
        raise Refusal("R4", "LoRA's target modules are computed from the model; name them, or write 'all-linear'")


def effective(what: Described) -> dict[str, Any]:
    """The trainer's fields, with the defaults of the classes that the notebook uses."""
    library = "transformers" if what.config_name == "TrainingArguments" else "trl"
    if what.api == "unsloth" and library == "trl":
        library = "unsloth"
    return DEFAULTS[library] | {key: value for key, value in what.config.items() if value is not None}


def max_length(what: Described) -> int | Unknown:
    """The trainer's length if set; otherwise TRL's default of 1024. With Unsloth the loader's, unless the trainer's is
    smaller."""
    own = what.config.get("max_length")
    if what.api != "unsloth":
        return 1024 if own is None else own
    length = what.loader.get("max_seq_length")
    length = 2048 if length is None else length
    if own is None or (isinstance(own, int) and isinstance(length, int) and length < own):
        return length
    return own


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:60] + "..."
