"""Turn the notebook's arguments into this project's configuration: loader, adapter, trainer, markers, output.

The values come from the trace, not from the source, so variables, `**settings` and arithmetic are already resolved.
Library defaults that the notebook relies on are written out if this project's defaults differ.
"""

from __future__ import annotations

import ast
import re
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from finetune.config.arguments import ANY, REFUSED, SETTINGS, TRAINER, rows
from finetune.config.arguments import row as row_of
from finetune.config.rules import TRACKERS
from finetune.config.sft_fields import sft_fields
from finetune.convert.hooks import seeded_generators
from finetune.convert.knowledge import ADAPTER, ADAPTER_DEFAULTS, LOADER, arguments, matches
from finetune.convert.read import Refusal
from finetune.convert.roles import Plan, event_of, training_events
from finetune.convert.services import below_working_folder, is_hosted
from finetune.convert.settings_rows import refuse_rows, set_format, set_responses
from finetune.convert.trace import Trace
from finetune.convert.values import (
    UNCUT,
    Described,
    Settings,
    Unknown,
    described,
    effective,
    has_unknown,
    known,
    max_length,
    short,
)

# peft 0.19 utils/constants.py, TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING, by model name; all other
# text generation models in it have q_proj and v_proj.
_PEFT_TARGETS = (
    (r"gpt2|starcoderbase|santacoder", ("c_attn",)),
    (r"pythia|neox|falcon|bloom|dolly", ("query_key_value",)),
    (r"phi-?(1|2)", ("q_proj", "v_proj", "fc1", "fc2")),
    (r"mpt-", ("Wqkv",)),
)
_QUANTIZATION = frozenset(
    "load_in_4bit load_in_8bit bnb_4bit_quant_type bnb_4bit_use_double_quant bnb_4bit_compute_dtype"
    " bnb_4bit_quant_storage".split()
)
# FastLanguageModel, and the classes that it chooses from.
_TEXT_LOADERS = frozenset(
    f"Fast{name}Model"
    for name in "Language Llama Mistral Qwen2 Qwen3 Qwen3Moe Gemma Gemma2 Cohere Granite FalconH1".split()
)


def make_settings(plan: Plan, traces: list[Trace]) -> Settings:
    """Derive the settings. Raises Refusal (R3, R4) for values only known at run time and for unsupported arguments."""
    what = described(traces[0])
    settings = Settings()
    _model(settings, what, traces)
    _lora(settings, what, plan)
    _data(settings, what, plan)
    _training(settings, what, plan)
    set_responses(settings, what, plan)
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
    seeded = seeded_generators(plan.program)
    for statement in kept:
        if (match := draws.search(statement.source)) and match[0].partition(".")[0] not in seeded:
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
    if is_hosted(name):
        settings.notes.append(
            f"the model {name} is a path on a hosted service; set your own with --model.model_name_or_path"
        )
    unsloth = what.api == "unsloth"
    settings.set("model.backend", "auto" if unsloth else "transformers")
    other = not str(what.owner).startswith(("AutoModel", "SFTTrainer"))
    if (other or matches("images", str(what.owner))) and what.owner not in _TEXT_LOADERS and not unsloth:
        raise Refusal("R4", f"{what.owner} loads another class of model; the settings form loads AutoModelForCausalLM")
    settings.set("model.dtype", dtype_setting(traces))
    if what.owner == "SFTTrainer" and not {"dtype", "torch_dtype"} & given.keys():
        settings.notes.append("TRL loads a model by its name in float32; model.dtype sets the dtype here")
    _refuse_casts(settings, traces)
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
    if isinstance(given.get("quantization_config"), Unknown):
        rest = known(given["quantization_config"].item.get("kwargs", {"dict": []})).keys() - _QUANTIZATION
        if rest:
            settings.notes.append(f"of the quantization, {', '.join(sorted(rest))} is left out: the default is used")
    if eight:
        settings.set("model.load_in_8bit", True)
    in_float32 = given.pop("float32_mixed_precision", None) is True
    if full:
        settings.set("model.full_finetuning", True)
        _trained_weights(settings, what, in_float32)
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
        if key == "device_map" or key in arguments(LOADER, "setting"):
            continue
        if key in managed or key in arguments(LOADER, "ignored"):
            if value not in (False, None):
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
        if four or eight:
            reason = "a quantized model is trained without an adapter; add get_peft_model or peft_config"
            raise Refusal("R4", reason)
        full = True
    if full or sixteen or eight:
        four = False
    return four, eight and not full, sixteen and not full, full


def _trained_weights(settings: Settings, what: Described, in_float32: bool) -> None:
    """Full fine-tuning keeps its weights as the notebook loads them."""
    if in_float32:
        settings.set("training.master_weights", "float32")
    elif settings.sections["model"]["dtype"] in ("auto", "bfloat16") and what.owner != "SFTTrainer":
        settings.set("training.master_weights", "none")
        settings.notes.append(
            "the notebook trains weights in bfloat16, which loses small updates; remove training.master_weights from "
            "the settings to train them in float32"
        )


def dtype_setting(traces: list[Trace]) -> str:
    """The dtype to load the model in. `auto`, which follows the device, if the notebook chooses it at run time."""
    found = {_dtype(described(trace)) for trace in traces if event_of(trace, "load") and event_of(trace, "trainer")}
    return found.pop() if len(found) == 1 else "auto"


def _refuse_casts(settings: Settings, traces: list[Trace]) -> None:
    dtype = settings.sections["model"]["dtype"]
    for item in (item for trace in traces for item in training_events(trace) if item["kind"] == "cast"):
        if item["detail"] != dtype:
            reason = f"the model is cast to {item['detail']} after it is loaded; pass dtype to from_pretrained instead"
            raise Refusal("R4", reason)


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
    defaults = ADAPTER_DEFAULTS[what.adapter_kind]
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
    given = {key: value for key, value in given.items() if key not in arguments(ADAPTER, "ignored")}
    if given.pop("loftq_config", None):
        raise Refusal(
            "R4",
            arguments(ADAPTER)["loftq_config"].detail,
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
    refuse_rows(what, plan)
    settings.set("data.keep_empty", True, "as TRL: an answer may be empty on purpose")
    set_format(settings, what, plan, what.config.get("dataset_text_field"))
    if _flag(what.config.get("packing", False), "packing"):
        settings.set("data.packing", True)
    workers = what.config.get("dataset_num_proc")
    if isinstance(workers, int):
        settings.set("data.num_proc", workers)
    if template := what.config.get("chat_template_path"):
        if not str(template).endswith((".jinja", ".j2")):
            raise Refusal("R4", f"chat_template_path={template!r} adds another model's tokens; use a Jinja file")
        settings.set("model.chat_template", template)


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
    sampling = given.pop("train_sampling_strategy", "random")
    sampling = "group_by_length" if given.pop("group_by_length", False) is True else sampling
    if sampling == "group_by_length" and not settings.sections["data"].get("packing"):
        settings.set("training.train_sampling_strategy", sampling)
    elif sampling != "random":
        settings.notes.append(f"train_sampling_strategy {sampling!r}: training.seed sets the order of the rows")
    settings.set("training.gradient_checkpointing", checkpointing(what))
    settings.set(
        "logging.logging_steps",
        max(1, int(given.pop("logging_steps"))) if not isinstance(given.get("logging_steps"), Unknown) else 1,
    )
    _evaluation(settings, given, plan)
    _best_model(settings, given, plan)
    resume = what.train.get("resume_from_checkpoint")
    if resume is not None and isinstance(plan.program.statements[plan.key["train"]].node, ast.If | ast.Try):
        resume = None
        settings.notes.append(
            "the notebook resumes if there is a checkpoint: start the script with"
            " --training.resume_from_checkpoint true for that"
        )
    if isinstance(resume, Unknown | list):  # a symbol
        settings.notes.append(
            "resume_from_checkpoint is only known at run time: pass --training.resume_from_checkpoint true to resume"
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


def _best_model(settings: Settings, given: dict[str, Any], plan: Plan) -> None:
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
        if plan.eval_expression is not None:
            raise Refusal("R4", "load_best_model_at_end needs evaluation every few steps; set eval_strategy='steps'")
        settings.notes.append("load_best_model_at_end is left out: there are no held-out rows")
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


def _other_fields(settings: Settings, given: dict[str, Any], what: Described) -> None:
    """Pass fields of SFTConfig through, note those that the package decides, and refuse another loss."""
    fields = sft_fields()
    for key, value in given.items():
        row = row_of(key)
        if value is None or ANY in row.neutral or value in (*row.neutral, *row.kept):
            continue
        if SETTINGS in row.refused:
            if row.settings:
                raise Refusal("R4", f"{key}={value!r} is not supported; {row.settings}")
            raise Refusal("R4", f"unsupported loss: {key}={value!r}; the loss is the mean over the supervised tokens")
        if key in ("report_to", "run_name") and isinstance(value, str | list) and (to := _trackers(given)):
            settings.set(*(("logging.report_to", to) if key == "report_to" else ("training.run_name", value)))
        elif key in REFUSED or row.settings or key not in fields:
            why = row.settings or row.instead or row.drop_in or "the installed TRL has no such field"
            settings.notes.append(f"{what.config_name}: {key}={short(value)} is left out: {why}")
        elif has_unknown(value):
            raise Refusal("R4", f"training.{key} is only known at run time ({value}); write a constant")
        else:
            settings.set(f"training.{key}", value)
    for key, value in what.trainer.items():
        if value is not None:
            _trainer_argument(settings, key, value)


def _trackers(given: dict[str, Any]) -> list[str]:
    """The services of report_to beside TensorBoard; empty if one of them is unknown, such as `all`."""
    value = given.get("report_to")
    names = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    services = [name for name in names if name not in ("none", "tensorboard")]
    return services if all(name in TRACKERS for name in services) else []


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
    row = rows(TRAINER).get(key)
    if row is None or SETTINGS in row.refused:
        raise Refusal("R4", row and row.settings or f"SFTTrainer's argument {key} is not supported")
    if not row.settings:
        return
    if key == "data_collator" and name == "DataCollatorForCompletionOnlyLM":
        return  # handled in `set_responses`
    if isinstance(value, Unknown) and value.name.startswith("transformers.") and name == _MASKS_PADDING:
        raise Refusal(
            "R4", f"{name} masks every token with the id of the padding token, often EOS too; leave the collator out"
        )
    if key == "data_collator" and name not in _COLLATORS:
        raise Refusal(
            "R4",
            f"SFTTrainer is given a custom data collator ({short(value)}), which decides what is supervised;"
            " leave it out",
        )
    settings.notes.append(f"SFTTrainer: {key} is left out: {row.settings}")


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
    local = below_working_folder(chosen)
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
