"""Turn the notebook's arguments into this project's configuration: loader, adapter, trainer, markers, output.

The values come from the trace, not from the source, so variables, `**settings` and arithmetic are already resolved.
Library defaults that the notebook relies on are written out if this project's defaults differ.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from finetune.config.sft_fields import MANAGED, sft_fields
from finetune.convert.names import root, target_names
from finetune.convert.read import Refusal
from finetune.convert.roles import Plan, event_of
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

# Defaults of the libraries. Unsloth: SFTConfig in models/rl.py of unsloth 2026.10; transformers: class
# TrainingArguments of transformers 5.17; TRL: class SFTConfig of trl 1.15.
_HF = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "num_train_epochs": 3.0,
    "weight_decay": 0.0,
    "seed": 42,
    "optim": "adamw_torch_fused",
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "max_grad_norm": 1.0,
    "logging_steps": 500,
}
_TRL = _HF | {"learning_rate": 2e-5, "logging_steps": 10}
_UNSLOTH = _HF | {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "weight_decay": 0.001,
    "seed": 3407,
    "optim": "adamw_8bit",
    "warmup_steps": 0.1,
    "logging_steps": 1,
}
# Defaults of Unsloth's get_peft_model and PEFT's LoraConfig.
_ADAPTERS = {
    "unsloth": {"r": 16, "lora_alpha": 16, "lora_dropout": 0.0},
    "peft": {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0},
}

# peft 0.19 utils/constants.py, TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING, by model name; all other
# text generation models in it have q_proj and v_proj.
_PEFT_TARGETS = (
    (r"gpt2|starcoderbase|santacoder", ("c_attn",)),
    (r"pythia|neox|falcon|bloom|dolly", ("query_key_value",)),
    (r"phi-?(1|2)", ("q_proj", "v_proj", "fc1", "fc2")),
    (r"mpt-", ("Wqkv",)),
)

# FastLanguageModel, and the classes that it chooses from.
_TEXT_LOADERS = frozenset(
    f"Fast{name}Model"
    for name in "Language Llama Mistral Qwen2 Qwen3 Qwen3Moe Gemma Gemma2 Cohere Granite FalconH1".split()
)
_RENAMED = {
    "tokenizer": "processing_class",
    "evaluation_strategy": "eval_strategy",
    "max_seq_length": "max_length",
    "no_cuda": "use_cpu",
}
# Arguments of SFTTrainer in older TRL that are now fields of SFTConfig.
_MOVED = frozenset("dataset_text_field max_length packing dataset_num_proc dataset_kwargs neftune_noise_alpha".split())
UNCUT = -1  # stands for SFTConfig(max_length=None), which truncates nothing; None there means that it is not set
# Arguments that are left out, with the reason for the report.
_LEFT_OUT = {
    "model": "",
    "args": "",
    "train_dataset": "",
    "eval_dataset": "",
    "processing_class": "",
    "peft_config": "",
    "formatting_func": "build_dataset calls it",
    "callbacks": "",
    "data_collator": "the package pads batches; tokens and labels are the same",
    "compute_metrics": "evaluation gives the loss and the perplexity",
    "preprocess_logits_for_metrics": "evaluation gives the loss and the perplexity",
    "model_init_kwargs": "the model section has these settings",
    "dataset_kwargs": "the package tokenizes once and drops other columns",
    "bf16": "set by model.dtype",
    "fp16": "set by model.dtype",
    "tf32": "the package chooses it for the device",
    "bf16_full_eval": "set by model.dtype",
    "fp16_full_eval": "set by model.dtype",
    "report_to": "metrics go to TensorBoard",
    "run_name": "metrics go to TensorBoard",
    "logging_dir": "metrics go to TensorBoard",
    "padding_free": "set by data.packing",
    "group_by_length": "only training.seed determines the order of the rows",
    "gradient_checkpointing_kwargs": "set by training.gradient_checkpointing",
    "eval_strategy": "set by training.eval_steps",
    "save_strategy": "set by training.save_steps",
    "logging_strategy": "set by logging.logging_steps",
    "do_train": "script.run trains",
    "do_eval": "evaluation runs if there are held-out rows",
    "deepspeed": "training uses DDP",
    "fsdp": "training uses DDP",
    "fsdp_config": "training uses DDP",
    "local_rank": "the launcher sets it",
    "use_cpu": "the launcher chooses the device",
    "remove_unused_columns": "the package drops other columns",
    "infinite_sampling": "",
    "log_level": "logging.log_level sets it",
    "log_level_replica": "logging.log_level sets it",
    "packing_strategy": "set by data.packing",
}


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
    trainer = {_RENAMED.get(str(key), str(key)): value for key, value in known(trainer_event["detail"]).items()}
    config, config_name = _arguments(trainer.get("args"), api)
    moved = {key: trainer.pop(key) for key in _MOVED & trainer.keys()}
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
    return {_RENAMED.get(str(key), str(key)): value for key, value in kwargs.items()}, name


def _adapter(trace: Trace, trainer: dict[str, Any], api: str) -> tuple[dict[str, Any] | None, str]:
    adapt = event_of(trace, "adapt")
    if adapt is not None:
        name, args, kwargs = adapt["detail"]
        given = known(kwargs)
        if str(name).startswith("unsloth."):
            return dict(zip(ADAPTER_ARGUMENTS["unsloth"], known(args), strict=False)) | given, "unsloth"
        config = (*known(args), given.get("peft_config"))[0]
        return _lora_config(config), "peft"
    if trainer.get("peft_config") is not None:
        return _lora_config(trainer["peft_config"]), "peft"
    return None, "unsloth" if api == "unsloth" else "peft"


def _lora_config(value: Any) -> dict[str, Any]:
    if isinstance(value, Unknown) and value.name.rsplit(".", 1)[-1] == "LoraConfig":
        given = known(value.item["kwargs"])
        targets = given.get("target_modules")
        if has_unknown(targets) and "named_modules()" in str(targets):
            given["target_modules"] = "all-linear"  # `find_all_linear_names(model)`: all except the head
        return given
    raise Refusal("R4", f"the adapter must be a LoraConfig, got {value}")


def effective(what: Described) -> dict[str, Any]:
    """The trainer's fields, with the defaults of the classes that the notebook uses."""
    defaults = _UNSLOTH if what.api == "unsloth" else _TRL
    if what.config_name == "TrainingArguments":
        defaults = _HF
    found = dict(defaults)
    ratio = what.config.get("warmup_ratio")
    if ratio is not None and "warmup_steps" not in what.config:
        found["warmup_steps"] = ratio
    given = {key: value for key, value in what.config.items() if value is not None and key != "warmup_ratio"}
    return found | given


def max_length(what: Described) -> int | Unknown:
    """The trainer's length if set; otherwise the loader's with Unsloth, or TRL's default of 1024."""
    if (own := what.config.get("max_length")) is not None:
        return own
    if what.api == "unsloth":
        length = what.loader.get("max_seq_length")
        return 2048 if length is None else length
    return 1024


# --- notebook -> settings ---------------------------------------------------------------------------------------------


def make_settings(plan: Plan, traces: list[Trace]) -> Settings:
    """Derive the settings. Raises Refusal (R3, R4) for values only known at run time and for unsupported arguments."""
    what = described(traces[0])
    settings = Settings()
    _model(settings, what, traces)
    _lora(settings, what, plan)
    _data(settings, what, plan)
    _training(settings, what, plan)
    _responses(settings, what, plan)
    _output(settings, what, plan, traces[0])
    _note_branches(settings, what, traces[1])
    _note_chance(settings, plan)
    for name, value in [(f"{s}.{k}", v) for s, keys in settings.sections.items() for k, v in keys.items()]:
        if has_unknown(value):
            raise Refusal("R4", f"the setting {name} is only known at run time ({value}); write a constant")
    return settings


def _note_chance(settings: Settings, plan: Plan) -> None:
    """Note rows that are drawn by chance without a seed."""
    draws = re.compile(r"\b(?:random|rng)\.(?:shuffle|sample|choices?|randint|random|permutation)\(|\.shuffle\(\)")
    kept = [plan.program.statements[place] for place in plan.hooks["dataset"] + plan.hooks["module"]]
    if any(re.search(r"\bseed\b|random_state", statement.source) for statement in kept):
        return
    for statement in kept:
        if match := draws.search(statement.source):
            settings.notes.append(
                f"cell {statement.cell}: `{match[0].rstrip('(')}` has no seed, as in the notebook: the rows are drawn"
                " once and kept in the cache; a new cache draws others"
            )
            return


def _note_branches(settings: Settings, what: Described, other: Trace) -> None:
    """Note values that the notebook chooses at run time, such as by device: the settings have one of them."""
    if event_of(other, "load") is None or event_of(other, "trainer") is None:
        return
    second = described(other)
    one = {**what.loader, **(what.adapter or {}), **effective(what)}
    two = {**second.loader, **(second.adapter or {}), **effective(second)}
    for key, value in one.items():
        if key in ("fp16", "bf16", "device_map", "dtype", "torch_dtype") or two.get(key) == []:
            continue
        if key in two and not has_unknown(value) and not has_unknown(two[key]) and value != two[key]:
            settings.notes.append(
                f"the notebook chooses {key} at run time; the settings have {value!r}, the other branch has"
                f" {two[key]!r}"
            )


def _flag(value: Any, name: str) -> bool:
    if isinstance(value, Unknown):
        raise Refusal("R4", f"{name} is only known at run time ({value}); write True or False")
    return bool(value)


def _model(settings: Settings, what: Described, traces: list[Trace]) -> None:
    given = {key: value for key, value in what.loader.items() if value is not None}
    name = given.pop("model_name", None)
    if not isinstance(name, str):
        raise Refusal("R4", f"the model's name is only known at run time ({name}); write a constant")
    settings.set("model.model_name_or_path", name)
    if name.startswith(("/content/", "/kaggle/")):
        settings.notes.append(
            f"the model {name} is a path on a hosted service; set your own with --model.model_name_or_path"
        )
    unsloth = what.api == "unsloth"
    settings.set("model.backend", "auto" if unsloth else "transformers")
    settings.set("model.dtype", dtype_setting(traces))
    for key in ("dtype", "torch_dtype"):
        given.pop(key, None)
    four, eight, sixteen, full = bits(given, what)
    settings.set("model.load_in_4bit", four)
    if four and isinstance(given.get("quantization_config"), Unknown):
        kind = known(given["quantization_config"].item["kwargs"])
        if kind.get("bnb_4bit_quant_type") != "nf4" or not kind.get("bnb_4bit_use_double_quant"):
            settings.notes.append("4-bit quantization is NF4 with double quantization here, but not in the notebook")
        if kind.get("bnb_4bit_compute_dtype") is not None:
            settings.notes.append("bnb_4bit_compute_dtype is left out: 4-bit layers compute in model.dtype")
    if eight:
        settings.set("model.load_in_8bit", True)
    if full:
        settings.set("model.full_finetuning", True)
    if unsloth and what.owner not in _TEXT_LOADERS:
        if what.owner != "FastModel":
            raise Refusal("R3", f"the model is loaded by {what.owner}; only text is supported")
        settings.set("model.loader", "FastModel")
    for key in ("revision", "attn_implementation", "trust_remote_code"):
        if given.get(key):
            settings.set(f"model.{key}", given[key])
    if given.get("trust_remote_code"):
        settings.notes.append(
            "model.trust_remote_code is on, as in the notebook: Python code from the model's repository is executed"
        )
    _loader_rest(settings, given, what, sixteen)


def _loader_rest(settings: Settings, given: dict[str, Any], what: Described, sixteen: bool) -> None:
    from finetune.config.rules import MANAGED_ARGUMENTS

    managed = {key: why for keys, why in MANAGED_ARGUMENTS["model.loader_kwargs"].items() for key in keys.split()}
    if (place := given.get("device_map")) is not None:
        warning = (
            f"; {place!r} would spread one model over all devices, on every rank"
            if place in ("balanced", "auto", "sequential")
            else ""
        )
        settings.notes.append(f"device_map is left out: each rank loads the whole model onto its own device{warning}")
    if given.pop("use_flash_attention_2", False) is True:
        settings.set("model.attn_implementation", "flash_attention_2")
    rest = {}
    for key, value in given.items():
        if key in (
            "revision",
            "attn_implementation",
            "trust_remote_code",
            "device_map",
            "quantization_config",
            "max_seq_length",
        ):
            continue
        if key in managed or key in (
            "token",
            "use_auth_token",
            "low_cpu_mem_usage",
            "use_cache",
            "cache_dir",
            "load_in_16bit",
            "return_dict",
            "use_safetensors",
            "local_files_only",
            "offload_folder",
            "offload_state_dict",
            "force_download",
            "resume_download",
        ):
            if key not in ("load_in_4bit", "load_in_8bit", "full_finetuning", "load_in_16bit") and value not in (
                False,
                None,
            ):
                settings.notes.append(
                    f"the loader's {key} is left out" + (f": {managed[key]}" if key in managed else "")
                )
            continue
        rest[key] = value
    if sixteen:
        rest["load_in_16bit"] = True
    if rest and what.api != "unsloth":
        raise Refusal("R4", f"the loader's {', '.join(rest)} cannot be set on the transformers backend")
    if rest:
        settings.set("model.loader_kwargs", rest)


def bits(given: dict[str, Any], what: Described) -> tuple[bool, bool, bool, bool]:
    """Whether to load in 4, 8 or 16 bits, and full fine-tuning. Unsloth loads in 4 bits by default."""
    full = _flag(given.get("full_finetuning", False), "full_finetuning")
    four = _flag(given.get("load_in_4bit", what.api == "unsloth"), "load_in_4bit")
    eight = _flag(given.get("load_in_8bit", False), "load_in_8bit")
    sixteen = _flag(given.get("load_in_16bit", False), "load_in_16bit")
    quantization = given.get("quantization_config")
    if isinstance(quantization, Unknown):
        kwargs = known(quantization.item.get("kwargs", {"dict": []}))
        four, eight = (_flag(kwargs.get(f"load_in_{n}bit", False), f"load_in_{n}bit") for n in (4, 8))
        if quantization.name.rsplit(".", 1)[-1] != "BitsAndBytesConfig":
            raise Refusal("R4", f"unsupported quantization ({quantization}); use a BitsAndBytesConfig with 4 or 8 bits")
    if what.api == "transformers" and what.adapter is None:
        full = True
    if full or sixteen or eight:
        four = False
    return four, eight and not full, sixteen and not full, full


def dtype_setting(traces: list[Trace]) -> str:
    """The dtype to load the model in. `auto`, which follows the device, if the notebook chooses it at run time."""
    found = {_dtype(described(trace)) for trace in traces if event_of(trace, "load") and event_of(trace, "trainer")}
    return found.pop() if len(found) == 1 else "auto"


def _dtype(what: Described) -> str:
    value = what.loader.get("dtype") or what.loader.get("torch_dtype")
    names = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32", "half": "float16", "float": "float32"}
    if isinstance(value, str) and value.removeprefix("torch.") in names:
        return names[value.removeprefix("torch.")]
    if isinstance(value, Unknown) and value.name.removeprefix("torch.") in names:
        return names[value.name.removeprefix("torch.")]
    half = what.api == "transformers" and value is None and what.config.get("fp16") is True
    return "float16" if half else "auto"


def _lora(settings: Settings, what: Described, plan: Plan) -> None:
    if settings.sections["model"].get("full_finetuning"):
        if what.adapter:
            settings.notes.append("the adapter is left out: full fine-tuning trains every weight")
        return
    if what.adapter is None:
        raise Refusal(
            "R4",
            "no adapter is attached and full_finetuning is not set, so nothing would be trained unless the model is"
            " itself an adapter; to continue training one, load its base model, call get_peft_model, and in the"
            " settings name the adapter as the model and replace the lora section by continue_adapter: true",
        )
    given = {key: value for key, value in what.adapter.items() if value is not None}
    defaults = _ADAPTERS[what.adapter_kind]
    for key in ("r", "lora_alpha", "lora_dropout"):
        value = given.pop(key, defaults[key])
        settings.set(f"lora.{key}", float(value) if key == "lora_dropout" and isinstance(value, int) else value)
    if (targets := given.pop("target_modules", None)) == []:
        raise Refusal("R4", "LoRA's target modules are only known at run time; name them, or write 'all-linear'")
    if targets is not None:
        settings.set("lora.target_modules", list(targets) if isinstance(targets, tuple) else targets)
    elif what.adapter_kind == "peft":
        name = str(what.loader.get("model_name")).lower()
        chosen = next(
            (list(names) for pattern, names in _PEFT_TARGETS if re.search(pattern, name)), ["q_proj", "v_proj"]
        )
        settings.set("lora.target_modules", chosen, "PEFT's default for this family")
    for key in ("modules_to_save", "use_rslora", "bias"):
        if value := given.pop(key, None):
            settings.set(f"lora.{key}", value)
    seed = given.pop("random_state", 3407 if what.adapter_kind == "unsloth" else None)
    if seed is not None:
        settings.set("lora.random_state", seed)
    given.pop("use_gradient_checkpointing", None)  # in the training section
    for key in ("max_seq_length", "task_type", "inference_mode", "peft_type", "base_model_name_or_path", "revision"):
        given.pop(key, None)
    if given.pop("loftq_config", None):
        raise Refusal(
            "R4",
            "initializing the adapter with LoftQ (loftq_config) is not supported; leave loftq_config and"
            " init_lora_weights out",
            plan.program.statements[plan.key.get("adapter", plan.key["trainer"])].cell,
        )
    if given:
        settings.set("lora.adapter_kwargs", given)


def _data(settings: Settings, what: Described, plan: Plan) -> None:
    length = max_length(what)
    explicit = what.config.get("max_length")
    default = "the loader's max_seq_length" if what.api == "unsloth" else "TRL's default"
    if explicit == UNCUT:
        settings.set("data.max_length", None, "not truncated")
    else:
        settings.set("data.max_length", length, default if explicit is None else "")
    _rows_as_the_package_takes_them(what, plan)
    _format(settings, what, plan, what.config.get("dataset_text_field"))
    if _flag(what.config.get("packing", False), "packing"):
        settings.set("data.packing", True)
    workers = what.config.get("dataset_num_proc")
    if isinstance(workers, int):
        settings.set("data.num_proc", workers)
    if template := what.config.get("chat_template_path"):
        if not str(template).endswith((".jinja", ".j2")):
            raise Refusal("R4", f"chat_template_path={template!r} adds another model's tokens; use a Jinja file")
        settings.set("model.chat_template", template)


def _tokenizes(plan: Plan) -> bool:
    """Whether the notebook makes the token ids of its rows itself: a column `input_ids`, or rows that are what the
    tokenizer returns."""
    for place in plan.hooks["dataset"] + plan.hooks["module"]:
        for node in ast.walk(plan.program.statements[place].node):
            if isinstance(node, ast.Dict) and any(getattr(key, "value", 0) == "input_ids" for key in node.keys):
                return True
            if isinstance(node, ast.FunctionDef) and _returns_tokens(plan, node):
                return True
            if isinstance(node, ast.Lambda) and _is_tokens(plan, node.body, set()):
                return True
    return False


def _returns_tokens(plan: Plan, function: ast.FunctionDef) -> bool:
    """Whether a function returns what the tokenizer returned, possibly with further keys set."""
    nodes = list(ast.walk(function))
    tokens: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Assign) and _is_tokens(plan, node.value, tokens):
            tokens.update(name for target in node.targets for name in target_names(target))
    return any(isinstance(n, ast.Return) and n.value is not None and _is_tokens(plan, n.value, tokens) for n in nodes)


def _is_tokens(plan: Plan, value: ast.expr, tokens: set[str]) -> bool:
    if isinstance(value, ast.Name):
        return value.id in tokens
    if isinstance(value, ast.Dict):  # {**tokens, "labels": ...}
        spread = [item for key, item in zip(value.keys, value.values, strict=True) if key is None]
        return any(_is_tokens(plan, item, tokens) for item in spread)
    if not isinstance(value, ast.Call):
        return False
    if isinstance(value.func, ast.Name):
        return value.func.id in plan.tokenizers
    if isinstance(value.func, ast.Attribute) and value.func.attr in ("encode_plus", "batch_encode_plus", "__call__"):
        return root(value.func) in plan.tokenizers
    return False


def _rows_as_the_package_takes_them(what: Described, plan: Plan) -> None:
    """Refuse infinite streams, rows packed by TRL, and several held-out sets."""
    if isinstance(what.trainer.get("eval_dataset"), dict):
        raise Refusal("R4", "eval_dataset has several sets; pass one, because there is one held-out loss")
    train = what.trainer.get("train_dataset")
    if isinstance(train, Unknown) and train.name.endswith("ConstantLengthDataset"):
        raise Refusal("R4", "ConstantLengthDataset packs the rows; pass the rows to the trainer, with packing=True")
    text = "\n".join(plan.program.statements[place].source for place in plan.hooks["dataset"])
    if re.search(r"streaming\s*=\s*True", text) and not re.search(r"\.take\(|islice\(|\bDataset\.from_", text):
        raise Refusal(
            "R4", "the rows are a stream, but all rows are prepared before training; limit them with .take(n)"
        )


def _format(settings: Settings, what: Described, plan: Plan, text_field: Any) -> None:
    """Which columns are read and supervised. What is not known here is decided by the rows, in the library's order:
    TRL takes prompt and completion first, then messages, then the text field; Unsloth takes the text before messages.
    """
    columns = _columns(plan)
    tokenizes = _tokenizes(plan)
    if plan.formatting is not None:
        if tokenizes:
            raise Refusal("R4", "the trainer has a formatting_func, but the rows are token ids; leave one of them out")
        settings.set("data.format", "text")
        return
    if tokenizes:
        settings.notes.append("the notebook tokenizes its rows itself: token ids and labels are taken as they are")
    elif _has_completions(plan, columns) and not what.former_text_field:
        settings.set("data.format", "prompt_completion")
    elif what.api == "unsloth" and _unsloth_reads_text(what, columns, text_field):
        settings.set("data.format", "text")
        if text_field not in (None, "text"):
            settings.set("data.columns", {"text": text_field})
        sources = [plan.program.statements[place].source for place in plan.hooks["dataset"] + plan.hooks["module"]]
        if not re.search(r"eos_token|EOS|apply_chat_template", "\n".join(sources)):
            settings.notes.append("a text that does not end with EOS gets one, as in TRL; Unsloth's trainer adds none")
        return
    if what.former_text_field and not tokenizes:  # which took this column and no other
        settings.set("data.format", "text")
        if text_field not in (None, "text"):
            settings.set("data.columns", {"text": text_field})
        return
    if text_field not in (None, "text"):
        settings.set("data.dataset_text_field", text_field)
    settings.set("data.assistant_only_loss", bool(what.config.get("assistant_only_loss")))
    if (completion := what.config.get("completion_only_loss")) is not None:
        settings.set("data.completion_only_loss", bool(completion))
    if not columns:
        settings.notes.append(
            "the columns of the data set are unknown until it is loaded; the run reads them in TRL's order, and prints"
            " how"
        )


def _has_completions(plan: Plan, columns: set[str]) -> bool:
    """Whether the rows surely have prompts and completions: the notebook makes both, and removes neither."""
    if not {"prompt", "completion"} <= columns or columns & {"messages", "conversations"}:
        return False
    text = "\n".join(plan.program.statements[place].source for place in plan.hooks["dataset"])
    return "text" not in columns or not re.search(r"column_names|remove_columns\W.*\b(prompt|completion)\b", text)


def _unsloth_reads_text(what: Described, columns: set[str], text_field: Any) -> bool:
    """Whether Unsloth's trainer reads the text field of rows with these columns."""
    if what.config.get("assistant_only_loss"):
        return False
    return (
        text_field is not None or "text" in columns
        if columns & {"text"}
        else (isinstance(text_field, str) and (text_field != "text" or not columns & {"messages", "prompt"}))
    )


def _columns(plan: Plan) -> set[str]:
    """Columns that the data preparation creates: keys of dicts, and renamed or added columns."""
    found: set[str] = set()
    for place in plan.hooks["dataset"] + plan.hooks["module"]:
        for node in ast.walk(plan.program.statements[place].node):
            if isinstance(node, ast.Dict):
                found |= {str(key.value) for key in node.keys if isinstance(key, ast.Constant)}
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr.startswith(("rename", "add_column", "select_columns"))
            ):
                found |= {str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant)}
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript | ast.Attribute):
                target = node.targets[0]
                if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
                    found.add(str(target.slice.value))
                if isinstance(target, ast.Attribute) and target.attr == "name" and isinstance(node.value, ast.Constant):
                    found.add(str(node.value.value))
    return found & {"text", "messages", "conversations", "prompt", "completion", "instruction", "output"}


def _training(settings: Settings, what: Described, plan: Plan) -> None:
    given = effective(what)
    per_device, steps = given.pop("per_device_train_batch_size"), given.pop("gradient_accumulation_steps")
    if not (isinstance(per_device, int) and isinstance(steps, int)):
        raise Refusal("R4", f"the batch size is only known at run time ({per_device} x {steps}); write numbers")
    settings.set("training.output_dir", "outputs")
    settings.set("training.global_batch_size", per_device * steps, f"{per_device} x {steps}, over all devices")
    if steps > 1:  # otherwise rows per device follow from the number of devices
        settings.set("training.per_device_train_batch_size", per_device)
    max_steps = given.pop("max_steps", -1)
    epochs = given.pop("num_train_epochs")
    if isinstance(max_steps, Unknown):
        raise Refusal("R4", f"the setting training.max_steps is only known at run time ({max_steps}); write a number")
    if isinstance(max_steps, int) and max_steps > 0:
        settings.set("training.max_steps", max_steps, "demo")
    else:
        settings.set("training.num_train_epochs", float(epochs) if isinstance(epochs, int) else epochs)
    for key in ("learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "optim", "max_grad_norm", "seed"):
        value = given.pop(key)
        if key in ("learning_rate", "warmup_steps", "weight_decay", "max_grad_norm") and isinstance(value, int):
            value = float(value) if key != "warmup_steps" else value
        if isinstance(value, Unknown) and key in ("optim", "lr_scheduler_type"):
            value = value.name.rsplit(".", 1)[-1].lower()
        if key != "max_grad_norm" or value != 1.0:
            settings.set(f"training.{key}", value)
    settings.set("training.gradient_checkpointing", checkpointing(what))
    settings.set(
        "logging.logging_steps",
        max(1, int(given.pop("logging_steps"))) if not isinstance(given.get("logging_steps"), Unknown) else 1,
    )
    _evaluation(settings, given, plan)
    _best_model(settings, given)
    resume = what.train.get("resume_from_checkpoint")
    if resume is not None and isinstance(plan.program.statements[plan.key["train"]].node, ast.If | ast.Try):
        resume = None
        settings.notes.append(
            "the notebook resumes if there is a checkpoint: start the script with"
            " --training.resume_from_checkpoint true for that"
        )
    if isinstance(resume, str) or resume is True:
        settings.set("training.resume_from_checkpoint", resume)
    _other_fields(settings, given, what)


def checkpointing(what: Described) -> Any:
    if what.api == "unsloth":
        given = (what.adapter or {}).get(
            "use_gradient_checkpointing", what.loader.get("use_gradient_checkpointing", "unsloth")
        )
        return given if isinstance(given, bool) else "unsloth" if given == "unsloth" else str(given).lower() == "true"
    value = what.config.get("gradient_checkpointing", what.config_name != "TrainingArguments")
    return value is not False or what.checkpoints


def _evaluation(settings: Settings, given: dict[str, Any], plan: Plan) -> None:
    strategy = str(given.pop("eval_strategy", "no")).lower().rsplit(".", 1)[-1]
    steps = given.pop("eval_steps", None)
    if plan.eval_expression is not None and strategy == "steps":
        every = (
            settings.sections["logging"]["logging_steps"] if steps is None else _count(settings, "eval_steps", steps)
        )
        settings.set("training.eval_steps", every)
    elif strategy == "epoch":
        settings.notes.append(
            "eval_strategy 'epoch': evaluation runs before and after training; set training.eval_steps for more"
        )
    stops_early = any("EarlyStopping" in plan.program.statements[place].source for place in plan.hooks["trainer"])
    if (
        stops_early or "EarlyStopping" in str(plan.callbacks and ast.unparse(plan.callbacks))
    ) and not settings.sections["training"].get("eval_steps"):
        raise Refusal(
            "R4", "EarlyStoppingCallback needs evaluation every few steps; set eval_strategy='steps' and eval_steps"
        )
    saving = str(given.pop("save_strategy", "steps")).lower().rsplit(".", 1)[-1]
    every = given.pop("save_steps", 500)
    if saving == "no":
        settings.set("training.save_steps", 0)
    elif saving == "epoch":
        settings.notes.append(
            "save_strategy 'epoch': checkpoints are saved every training.save_steps steps (500) and at the end"
        )
    elif every != 500:
        settings.set("training.save_steps", _count(settings, "save_steps", every))
    limit = given.pop("save_total_limit", None)
    if isinstance(limit, int) and limit > 0:
        settings.set("training.save_total_limit", limit)
    size = given.pop("per_device_eval_batch_size", None)
    if isinstance(size, int):
        settings.set("training.per_device_eval_batch_size", size)


def _best_model(settings: Settings, given: dict[str, Any]) -> None:
    """Which checkpoint is the final model. Evaluation gives eval_loss; other metrics need logits."""
    best = given.pop("load_best_model_at_end", False)
    metric = str(given.pop("metric_for_best_model", None) or "loss")
    given.pop("greater_is_better", None)
    if best is not True:
        return
    if metric.removeprefix("eval_") != "loss":
        settings.notes.append(
            f"load_best_model_at_end by {metric} is left out: evaluation has only the loss; the final model is the last"
        )
    elif not settings.sections["training"].get("eval_steps"):
        settings.notes.append(
            "load_best_model_at_end is left out, because evaluation every few steps is not set: set training.eval_steps"
            " and training.load_best_model_at_end"
        )
    else:
        settings.set("training.load_best_model_at_end", True)


def _count(settings: Settings, name: str, steps: Any) -> int | Unknown:
    """A number of steps. Below 1 it is a fraction of all steps, which is only known if max_steps is set."""
    if isinstance(steps, Unknown) or steps == int(steps):
        return steps if isinstance(steps, Unknown) else int(steps)
    total = settings.sections["training"].get("max_steps")
    if total is None:
        settings.notes.append(f"{name}={steps} is a fraction of all steps; set training.{name} to a number of steps")
    return max(1, round(steps * total)) if total else 0


# Values of fields that have no effect here; None: any value.
_NEUTRAL = {
    "loss_type": ("nll", "chunked_nll"),
    "label_smoothing_factor": (0, 0.0),
    "shuffle_dataset": (False,),
    "push_to_hub": (False,),
    "neftune_noise_alpha": (0,),
    "use_liger_kernel": (False,),
    "completion_only_loss": (True, False),
    "assistant_only_loss": (True, False),
    "dataset_text_field": None,
    "dataset_num_proc": None,
    "max_length": None,
    "packing": None,
    "gradient_checkpointing": None,
    "output_dir": None,
    "overwrite_output_dir": None,
    "chat_template_path": None,
    "data_seed": None,
}


def _other_fields(settings: Settings, given: dict[str, Any], what: Described) -> None:
    """Pass fields of SFTConfig through, note those that the package decides, and refuse another loss."""
    fields = sft_fields()
    for key, value in given.items():
        neutral = _NEUTRAL.get(key, ())
        if neutral is None or value in neutral or value is None:
            continue
        if key in ("loss_type", "label_smoothing_factor", "completion_only_loss"):
            raise Refusal("R4", f"unsupported loss: {key}={value!r}; the loss is the mean over the supervised tokens")
        if key in MANAGED or key in _LEFT_OUT or key not in fields:
            why = _LEFT_OUT.get(key) or MANAGED.get(key) or "the installed TRL has no such field"
            settings.notes.append(f"{what.config_name}: {key}={_short(value)} is left out: {why}")
        elif has_unknown(value):
            raise Refusal("R4", f"training.{key} is only known at run time ({value}); write a constant")
        else:
            settings.set(f"training.{key}", value)
    for key in ("optimizer_cls_and_kwargs", "compute_loss_func", "model_init"):
        if what.trainer.get(key) is not None:
            raise Refusal("R4", f"SFTTrainer's argument {key} is not supported")
    for key, value in what.trainer.items():
        if (
            key in ("data_collator", "compute_metrics", "preprocess_logits_for_metrics", "optimizers")
            and value is not None
        ):
            _trainer_argument(settings, key, value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:60] + "..."


_MASKS_PADDING = "DataCollatorForLanguageModeling"
_COLLATORS = (
    "DataCollatorForSeq2Seq",
    "DataCollatorForLanguageModeling",
    "DataCollatorWithPadding",
    "DataCollatorWithFlattening",
    "default_data_collator",
)


def _trainer_argument(settings: Settings, key: str, value: Any) -> None:
    name = value.name.rsplit(".", 1)[-1] if isinstance(value, Unknown) else ""
    if key == "optimizers":
        raise Refusal("R4", "SFTTrainer is given a custom optimizer; use training.optim")
    if key == "data_collator" and name == "DataCollatorForCompletionOnlyLM":
        return  # handled in `_responses`
    if isinstance(value, Unknown) and value.name.startswith("transformers.") and name == _MASKS_PADDING:
        raise Refusal(
            "R4", f"{name} masks every token with the id of the padding token, often EOS too; leave the collator out"
        )
    if key == "data_collator" and name not in _COLLATORS:
        raise Refusal(
            "R4",
            f"SFTTrainer is given a custom data collator ({_short(value)}), which decides what is supervised;"
            " leave it out",
        )
    settings.notes.append(f"SFTTrainer: {key} is left out: {_LEFT_OUT[key]}")


# --- which part of a text is supervised ------------------------------------------------------------------------------


def _responses(settings: Settings, what: Described, plan: Plan) -> None:
    given = what.responses
    collator = what.trainer.get("data_collator")
    if given is None and isinstance(collator, Unknown) and collator.name.endswith("DataCollatorForCompletionOnlyLM"):
        kwargs = known(collator.item["kwargs"])
        args = known(collator.item["args"])
        given = {
            "response_part": kwargs.get("response_template", args[0] if args else None),
            "instruction_part": kwargs.get(
                "instruction_template", args[1] if len(args) > 1 and isinstance(args[1], str) else None
            ),
        }
    if given is None:
        return
    if what.responses is None and not isinstance(given["response_part"], str | None):
        raise Refusal(
            "R4",
            f"DataCollatorForCompletionOnlyLM is given token ids ({_short(given['response_part'])}); pass the template"
            ' as text: response_template="..."',
            plan.program.statements[plan.key["trainer"]].cell,
        )
    extra = [key for key in ("mask_out_tokens",) if given.get(key)]
    if extra:
        raise Refusal("R4", f"train_on_responses_only: {extra[0]} is not supported")
    if given.get("last_response_only"):
        settings.set("data.last_turn_only", True)
    instruction, response = given.get("instruction_part"), given.get("response_part")
    if response is None and (what.responses is None or instruction is not None):
        raise Refusal("R4", "the marker that starts a response is missing; set response_part")
    if response is None:
        response = "auto"
        settings.comments["data.response_part"] = "both markers are derived from the chat template, as in the notebook"
    if settings.sections["data"].get("format") not in (None, "text"):
        raise Refusal("R4", "train_on_responses_only needs rows of text")
    settings.set("data.format", "text")
    settings.sections["data"].pop("assistant_only_loss", None)
    if instruction is not None:
        settings.set("data.instruction_part", instruction)
    settings.set("data.response_part", response)


# --- output folder ----------------------------------------------------------------------------------------------------


def _output(settings: Settings, what: Described, plan: Plan, trace: Trace) -> None:
    """The folder of the first ordinary save, or the trainer's output_dir."""
    folder = what.config.get("output_dir")
    folder = folder if isinstance(folder, str) else "outputs"
    saved = [name for name in _saved(plan, trace)]
    chosen = saved[0] if saved else folder
    if saved and len(set(saved)) > 1:
        settings.notes.append(
            f"the notebook saves the same model to {', '.join(dict.fromkeys(saved))}; here it is saved once, in"
            f" {chosen}"
        )
    local = _local(chosen)
    if local != chosen:
        settings.notes.append(f"{chosen} is a path on a hosted service; the result is saved to {local}")
    path = PurePosixPath(local)
    if path.is_absolute() or ".." in path.parts or local.startswith("~") or PureWindowsPath(local).is_absolute():
        settings.notes.append(
            f"training.output_dir is {local}, as in the notebook, outside the script's working directory. Check that it"
            " is writable, or set another training.output_dir"
        )
    settings.set("training.output_dir", local)


def _saved(plan: Plan, trace: Trace) -> list[str]:
    found = []
    for item in trace["events"]:
        if (
            item["kind"] == "call"
            and item.get("method") in ("save_pretrained", "save_model")
            and item.get("role") in ("model", "trainer")
        ):
            place = plan.program.position(item["statement"])
            args = item["detail"][1][1:]
            kwargs = {key: value for key, value in item["detail"][2][1:]}
            name = args[0] if args else kwargs.get("save_directory", kwargs.get("output_dir"))
            if isinstance(name, list) and name[0] == "path":
                name = name[1]
            if place > plan.key["train"] and isinstance(name, str) and name and "<<" not in name:
                found.append(name)
    return found


def _local(path: str) -> str:
    """Map a path on Colab, Google Drive or Kaggle to one below the working directory."""
    for prefix in (
        "/content/drive/MyDrive/",
        "/content/drive/My Drive/",
        "/content/gdrive/MyDrive/",
        "/content/",
        "/kaggle/working/",
        "/workspace/",
    ):
        if path.startswith(prefix):
            return str(PurePosixPath(path.removeprefix(prefix))) or "outputs"
    return path
