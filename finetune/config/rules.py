"""Settings that exclude or need each other: one small rule per subject, all listed in `RULES`.

A rule takes the configuration, whose values are each valid by themselves, and the dotted names that the user wrote: a
default cannot contradict anything. It yields the names it is about and a text: what is wrong, then what to do.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain

from finetune.config.data_sources import entry_errors
from finetune.config.schema import DEFAULTS, Config
from finetune.config.sft_fields import lora_fields
from finetune.config.values import NotAllowed, convert, in_words, show

Contradiction = tuple[tuple[str, ...], str]
Contradictions = Iterator[Contradiction]
Rule = Callable[[Config, frozenset[str]], Contradictions]

# The embedded demo brings its own.
SOURCES = ("model.model_name_or_path", "data.train_file", "data.train", "data.dataset_name", "data.eval_file")
HELD_OUT = ("data.eval_file", "data.eval", "data.eval_fraction")  # each chooses the held-out rows

# Names in report_to, as in transformers (`INTEGRATION_TO_CALLBACK`), and what each needs: its module, its name for pip.
TRACKERS = {
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow"),
    "trackio": ("trackio", "trackio"),
    "comet_ml": ("comet_ml", "comet-ml"),
    "clearml": ("clearml", "clearml"),
    "swanlab": ("swanlab", "swanlab"),
    "dvclive": ("dvclive", "dvclive"),
    "neptune": ("neptune", "neptune"),
    "codecarbon": ("codecarbon", "codecarbon"),
    "dagshub": ("dagshub", "dagshub mlflow"),
    "azure_ml": ("azureml", "azureml-core"),
}
USER_CODE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")

ROLES = ("system", "developer", "user", "assistant", "tool")  # of messages

# Variables of chat templates that come from the row or are set for each rendering.
RESERVED_VARIABLES = frozenset(("messages", "tools", "documents", "add_generation_prompt"))

# Arguments of the loader and of get_peft_model that this program sets itself: key -> names -> what to do instead.
MANAGED_ARGUMENTS = {
    "model.loader_kwargs": {
        "model_name pretrained_model_name_or_path": "use model.model_name_or_path",
        "max_seq_length": "use data.max_length",
        "dtype torch_dtype": "use model.dtype",
        "load_in_4bit": "use model.load_in_4bit",
        "load_in_8bit": "use model.load_in_8bit",
        "load_in_fp8": "use model.load_in_fp8",
        "quantization_config": "use model.load_in_4bit or model.load_in_8bit",
        "full_finetuning": "use model.full_finetuning",
        "float32_mixed_precision": "use training.master_weights",
        "revision": "use model.revision",
        "trust_remote_code": "use model.trust_remote_code",
        "attn_implementation": "use model.attn_implementation",
        "use_gradient_checkpointing": "use training.gradient_checkpointing",
        "unsloth_tiled_mlp": "use model.tiled_mlp, which computes the slices with the same kernels as whole MLPs",
        "random_state": "use training.seed, and lora.random_state for the adapter",
        "token use_auth_token": "keep tokens out of configurations: run `hf auth login`, or set the variable HF_TOKEN",
        "device_map device_map_planner_kwargs max_memory": "use training.strategy: shard to split the model over GPUs",
        "fast_inference gpu_memory_utilization float8_kv_cache disable_log_stats max_lora_rank": (
            "it configures vLLM, which does not run during training"
        ),
        "auto_model on_model_resolved": "the model is always loaded for causal language modeling",
    },
    "lora.adapter_kwargs": {
        "r lora_alpha lora_dropout target_modules target_parameters modules_to_save use_rslora bias random_state": (
            "use lora.{name}"
        ),
        "use_gradient_checkpointing": "use training.gradient_checkpointing",
        "max_seq_length": "use data.max_length",
        "model peft_config": "use model.model_name_or_path",
        "task_type peft_type inference_mode": "the adapter is always a LoRA for causal language modeling",
        "base_model_name_or_path revision": "use model.model_name_or_path and model.revision",
        "alora_invocation_tokens": "PEFT looks for them once per row of a batch. Train with trl.SFTTrainer",
    },
}


def contradictions(config: Config, given: frozenset[str]) -> list[Contradiction]:
    """Settings that exclude each other, or lack what they need.

    Args:
        config: values that are each valid by themselves.
        given: the dotted names that the user wrote; the others are defaults and cannot contradict anything.

    Returns:
        One `(names, text)` for each: the dotted names it is about, and what is wrong and what to do.
    """
    return list(chain.from_iterable(rule(config, given) for rule in RULES))


def _is_default(config: Config, name: str) -> bool:
    section, key = name.split(".")
    return getattr(getattr(config, section), key) == DEFAULTS[name]


def _changed(config: Config, names: Iterable[str]) -> tuple[str, ...]:
    """Those of the names whose values are not their defaults."""
    return tuple(name for name in names if not _is_default(config, name))


# Model and adapter --------------------------------------------------------------------------------------------------


def precision(config: Config, given: frozenset[str]) -> Contradictions:
    """4 bits, 8 bits, FP8 and full fine-tuning: one of them."""
    model = config.model
    kinds = ("load_in_4bit", "load_in_8bit", "load_in_fp8", "full_finetuning")
    if len(chosen := [name for name in kinds if getattr(model, name)]) > 1:
        text = f"{' and '.join(chosen)} exclude each other: weights are held in one form. Keep one."
        yield tuple(f"model.{name}" for name in chosen), text
    if model.load_in_fp8 and model.dtype == "float16":
        text = "products of FP8 weights are written in bfloat16. Set model.dtype to bfloat16 or auto."
        yield ("model.load_in_fp8", "model.dtype"), text
    if model.load_in_8bit and config.lora.adapter_kwargs.get("use_dora"):
        text = "PEFT's DoRA loses the scales of 8-bit weights after one pass. Set load_in_4bit instead, or no use_dora."
        yield ("model.load_in_8bit", "lora.adapter_kwargs"), text


OFFLOAD, SELECTIVE = "offload", "selective"  # values of training.gradient_checkpointing
AUTO, LOADED_AS = "auto", "unsloth"  # a model is loaded as the latter if the value is still to be found


def checkpointing_kinds(backend: str) -> tuple[str | bool, ...]:
    """The values of training.gradient_checkpointing that a backend has, the cheapest in memory first. A sharded model
    has those of the transformers backend."""
    return ("unsloth", True, False) if backend == "unsloth" else (OFFLOAD, True, SELECTIVE, False)


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How activations are kept, by the two settings that decide it."""

    gradient_checkpointing: str | bool
    tiled_mlp: bool

    def settings(self) -> dict[str, str]:
        """The settings, by key, as they are written."""
        kind, tiled = str(self.gradient_checkpointing).lower(), str(self.tiled_mlp).lower()
        return {"training.gradient_checkpointing": kind, "model.tiled_mlp": tiled}

    @property
    def text(self) -> str:
        """The settings as lines of a configuration."""
        lines = [f"{key}: {value}" for key, value in self.settings().items()]
        return " and ".join(lines if self.tiled_mlp else lines[:1])

    def set_in(self, config: Config) -> Config:
        """The configuration with these settings."""
        training = replace(config.training, gradient_checkpointing=self.gradient_checkpointing)  # type: ignore
        return replace(config, training=training, model=replace(config.model, tiled_mlp=self.tiled_mlp))


def activation_modes(backend: str) -> list[Mode]:
    """The ways to keep activations, from the one that computes nothing again to the one that needs the least memory."""
    kinds = checkpointing_kinds(backend)
    modes = [Mode(gradient_checkpointing=kind, tiled_mlp=False) for kind in reversed(kinds)]
    return [*modes, replace(modes[-1], tiled_mlp=True)]


def less_activation_memory(config: Config, backend: str) -> dict[str, str]:
    """Settings that make a row need less memory, and only take time: what the last of `activation_modes` differs in; of
    a job that computes nothing again, only that it does.

    Args:
        backend: that the run uses. A sharded model is trained with transformers.
    """
    backend = "transformers" if config.training.strategy == "shard" else backend
    own = Mode(gradient_checkpointing=config.training.gradient_checkpointing, tiled_mlp=config.model.tiled_mlp)
    wanted = activation_modes(backend)[-1]
    if not own.gradient_checkpointing:
        wanted = replace(own, gradient_checkpointing="unsloth" if backend == "unsloth" else True)
    return {key: value for key, value in wanted.settings().items() if value != own.settings()[key]}


def needs_transformers(config: Config) -> str | None:
    """The setting that only the transformers backend has, which `model.backend: auto` then takes; None if there is
    none."""
    if config.training.strategy == "shard":
        return "training.strategy: shard"
    if config.training.context_parallel > 1:
        return f"training.context_parallel: {config.training.context_parallel}"
    kind = config.training.gradient_checkpointing
    known = config.training.leaves_activations_open or kind in checkpointing_kinds("unsloth")
    return None if known else f"training.gradient_checkpointing: {kind}"


def unsloth_only(config: Config, given: frozenset[str]) -> Contradictions:
    """What only Unsloth's backend has."""
    if config.model.backend != "transformers":
        return
    for name in _changed(config, ("model.loader", "model.loader_kwargs")):
        text = f"{name} applies to Unsloth's classes only. Remove it, or backend: transformers."
        yield (name, "model.backend"), text
    if config.training.gradient_checkpointing == "unsloth":
        yield (
            ("model.backend", "training.gradient_checkpointing"),
            'gradient_checkpointing "unsloth" needs the unsloth backend. Use true for the standard kind, offload to '
            "keep layers' inputs in CPU memory, or false.",
        )


def _managed(name: str) -> dict[str, str]:
    """Argument -> what to do instead."""
    return {key: text for keys, text in MANAGED_ARGUMENTS[name].items() for key in keys.split()}


def managed_arguments(config: Config, given: frozenset[str]) -> Contradictions:
    """Arguments that have a key, or that this program decides."""
    passed: Mapping[str, Mapping[str, object]] = {
        "model.loader_kwargs": config.model.loader_kwargs,
        "lora.adapter_kwargs": config.lora.adapter_kwargs,
    }
    for name, arguments in passed.items():
        instead = _managed(name)
        for key in arguments:
            if key in instead:
                yield (name,), f"`{key}` cannot be set here: {instead[key].format(name=key)}."


# Starts of an adapter that PEFT makes from the model's own activations or gradients, in a pass over the data.
DATA_DRIVEN = ("eva", "corda", "lora_ga")
# Arguments of LoraConfig that count from 0.
_COUNTED = ("layers_to_transform", "trainable_token_indices")


def adapter_arguments(config: Config, given: frozenset[str]) -> Contradictions:
    """Arguments of LoraConfig: their names, if Unsloth cannot take them, and their types."""
    name, known = "lora.adapter_kwargs", lora_fields()
    for key, value in config.lora.adapter_kwargs.items():
        if key in _managed(name):
            continue
        if key not in known:
            if config.model.backend == "transformers":
                near = difflib.get_close_matches(key, known, n=1)
                nearest = f" Nearest is {near[0]}." if near else ""
                yield (name,), f"PEFT's LoraConfig has no `{key}`.{nearest} Correct it, or remove it."
            continue
        try:
            convert(value, known[key])
        except NotAllowed:
            yield (name,), f"`{key}: {show(value)}`: expected {in_words(known[key])}."
            continue
        if key in _COUNTED and any(one < 0 for one in _numbers(value)):
            yield (name,), f"`{key}: {show(value)}`: must be at least 0."
        if key == "init_lora_weights" and str(value).startswith(DATA_DRIVEN):
            yield (
                (name,),
                f"`init_lora_weights: {value}` needs a pass over the data that this program does not make. Use pissa or"
                " olora, which need none, or remove it.",
            )


def _numbers(value: object) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _numbers(one)


def adapter(config: Config, given: frozenset[str]) -> Contradictions:
    """Full fine-tuning has no adapter; an adapter that is continued keeps its shape."""
    lora_given = tuple(sorted(name for name in given if name.startswith("lora.")))
    if config.model.full_finetuning and lora_given:
        text = "full fine-tuning has no adapter. Remove full_finetuning or the `lora:` settings."
        yield ("model.full_finetuning", *lora_given), text
    shape = ("lora.target_parameters", "lora.bias", "lora.random_state", "lora.adapter_kwargs")
    fixed = _changed(config, shape)
    if config.lora.continue_adapter and fixed:
        text = "continue_adapter keeps the adapter as it was created. Remove the other settings."
        yield ("lora.continue_adapter", *fixed), text


def adapter_modules(config: Config, given: frozenset[str]) -> Contradictions:
    """An adapter on a layer and training it in full exclude each other, and the output embedding takes no adapter."""
    lora = config.lora
    if lora.target_modules is not None and not lora.target_modules and not lora.target_parameters:
        text = "must not be empty, unless lora.target_parameters names what has the adapter."
        yield ("lora.target_modules",), text
    targets = [lora.target_modules] if isinstance(lora.target_modules, str) else lora.target_modules or []
    if both := [name for name in targets if name in (lora.modules_to_save or ())]:
        text = f"{', '.join(both)} would have an adapter and be trained in full. Keep one."
        yield ("lora.target_modules", "lora.modules_to_save"), text
    elif config.model.backend == "transformers" and any(str(name).split(".")[-1] == "lm_head" for name in targets):
        text = "the loss reads the weights of lm_head, past an adapter. Name it in lora.modules_to_save, or remove it."
        yield ("lora.target_modules",), text


# Data ---------------------------------------------------------------------------------------------------------------


def training_data(config: Config, given: frozenset[str]) -> Contradictions:
    """A model needs training data from one source, and the demo brings its own."""
    data, sources = config.data, ("data.train_file", "data.dataset_name", "data.train")
    named = _changed(config, sources)
    if len(named) > 1:
        yield named, f"{'both' if len(named) == 2 else 'all'} name the training data. Keep one."
    if config.demo:
        if own := tuple(name for name in SOURCES if name in given):
            yield own, "--demo brings its own model and data. Remove it, or these settings."
    elif config.model.model_name_or_path is not None and not named:
        text = "there is no training data for the model. Set data.train_file, data.dataset_name or data.train."
        yield ("model.model_name_or_path", *sources), text
    if data.columns and data.dataset_text_field != "text":
        text = "both name the columns of the rows. Keep one."
        yield ("data.columns", "data.dataset_text_field"), text


def mixtures(config: Config, given: frozenset[str]) -> Contradictions:
    """The entries of data.train and data.eval, and the keys that belong into them."""
    for name, entries in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        for text in entry_errors(entries) if entries is not None else ():
            yield (name,), text
    for key, instead in (("data.dataset_config", "config"), ("data.split", "split")):
        if not _is_default(config, key) and config.data.train is not None:
            yield ("data.train", key), f"{key} does not apply to data.train. Set {instead} in its entry."
        elif not _is_default(config, key) and config.data.dataset_name is None:
            yield (key, "data.dataset_name"), f"{key} applies to a Hub dataset. Set data.dataset_name, or remove it."


def held_out_rows(config: Config, given: frozenset[str]) -> Contradictions:
    """Evaluation rows come from one source, and eval_steps needs one."""
    named = _changed(config, HELD_OUT)
    if len(named) > 1:
        yield named, f"{'both' if len(named) == 2 else 'all'} choose the held-out rows. Keep one."
    if config.training.eval_steps > 0 and not (config.demo or named):
        text = "eval_steps is set, but no rows are held out. Set data.eval_file or data.eval_fraction."
        yield ("training.eval_steps", *HELD_OUT), text


def loss_mask(config: Config, given: frozenset[str]) -> Contradictions:
    """Which tokens are trained on."""
    data = config.data
    if data.last_turn_only and not data.assistant_only_loss:
        text = "last_turn_only selects one of the assistant's turns. Set assistant_only_loss: true, or remove it."
        yield ("data.last_turn_only", "data.assistant_only_loss"), text
    if data.instruction_part is not None and data.response_part is None:
        text = "instruction_part needs a response_part. Set both."
        yield ("data.instruction_part", "data.response_part"), text
    if data.response_part == "auto" and data.instruction_part is not None:
        text = "response_part: auto finds both markers in the chat template. Set both markers, or auto alone."
        yield ("data.response_part", "data.instruction_part"), text
    if data.response_part is not None and data.format not in ("auto", "text", "document"):
        yield (
            ("data.response_part", "data.format"),
            f"markers are for rows of text, and the turns of format {data.format} are known without them. Remove"
            " response_part and instruction_part, or set data.format to text.",
        )
    if data.response_part is not None and not data.assistant_only_loss:
        text = "response_part selects the tokens to train on, and assistant_only_loss: false selects all. Keep one."
        yield ("data.response_part", "data.assistant_only_loss"), text


def trained_messages(config: Config, given: frozenset[str]) -> Contradictions:
    """What selects messages needs rows of messages and a loss on some of them; template variables need a template."""
    data = config.data
    if unknown := [role for role in data.train_on_roles or () if role not in ROLES]:
        known = ", ".join(ROLES)
        yield ("data.train_on_roles",), f"unknown role {', '.join(map(repr, unknown))}. Set roles out of {known}."
    reserved = sorted(RESERVED_VARIABLES & data.chat_template_kwargs.keys())
    if reserved:
        text = f"{', '.join(map(repr, reserved))} cannot be set here: the rows and this program set it. Remove it."
        yield ("data.chat_template_kwargs",), text
    try:
        datetime.fromisoformat(str(data.chat_template_kwargs.get("strftime_now", "2026-01-01")))
    except ValueError as error:
        text = f"strftime_now is today's date for the template: {error}. Set it to a date, such as 2026-01-31."
        yield ("data.chat_template_kwargs",), text
    names = ("data.train_on_roles", "data.train_on_tool_calls", "data.train_on_thinking")
    chosen = _changed(config, names)
    if chosen and not data.assistant_only_loss:
        text = "assistant_only_loss: false computes the loss on all messages. Keep one."
        yield (*chosen, "data.assistant_only_loss"), text
    chosen += _changed(config, ["data.chat_template_kwargs"])
    texts = {"data.format": data.format in ("text", "document"), "data.response_part": data.response_part is not None}
    of_text = tuple(name for name, is_set in texts.items() if is_set)
    if chosen and of_text:
        yield (*chosen, *of_text), "rows of text have no messages. Remove what selects them, or use rows of messages."


def packing(config: Config, given: frozenset[str]) -> Contradictions:
    """A pack holds at least the longest document, and a limit on documents has a number."""
    data = config.data
    if data.document_length is None and data.over_length not in (None, "truncate"):
        yield (
            ("data.over_length", "data.max_length"),
            f"over_length {data.over_length} applies to documents longer than max_length, which is null. Set"
            " max_length, or remove over_length.",
        )
    if data.packing and data.document_length is None:
        text = "packing needs a length, and max_length is null. Set data.pack_length."
        yield ("data.max_length", "data.packing"), text
    if data.packing and config.training.train_sampling_strategy == "group_by_length":
        text = "group_by_length reduces padding, and packs have none. Remove it, or set packing: false."
        yield ("training.train_sampling_strategy", "data.packing"), text
    if data.pack_length is None:
        return
    if not data.packing:
        yield ("data.pack_length", "data.packing"), "pack_length has no effect without packing. Set packing: true."
    elif data.max_length is not None and data.pack_length < data.max_length:
        yield (
            ("data.pack_length", "data.max_length"),
            f"pack_length {data.pack_length} is below max_length {data.max_length}, so the longest documents do not"
            " fit in a pack. Raise pack_length or lower max_length.",
        )


# Training -----------------------------------------------------------------------------------------------------------


def run_length(config: Config, given: frozenset[str]) -> Contradictions:
    """Steps or epochs."""
    lengths = ("training.max_steps", "training.num_train_epochs")
    if config.training.max_steps > 0 and given.issuperset(lengths):
        yield lengths, "both set the length of the run. Keep one (max_steps: -1 is off)."


FOLLOWS_LOSS = ("reduce_lr_on_plateau", "greedy")  # schedules


def best_model(config: Config, given: frozenset[str]) -> Contradictions:
    """The best model, early stopping and a schedule that follows evaluations need them during training, and their
    details need one of them."""
    training = config.training
    names = ("load_best_model_at_end", "early_stopping_patience", "metric_for_best_model")
    asking = tuple(f"training.{name}" for name in names if getattr(training, name))
    if asking and training.eval_steps == 0:
        yield (
            (*asking, "training.eval_steps"),
            "the best model is chosen by evaluations during training, and eval_steps is 0. Set training.eval_steps,"
            " and data.eval_file or data.eval_fraction.",
        )
    if training.early_stopping_threshold > 0 and training.early_stopping_patience is None:
        text = "early_stopping_threshold has no effect without early_stopping_patience. Set both, or remove it."
        yield ("training.early_stopping_threshold", "training.early_stopping_patience"), text
    if training.lr_scheduler_type in FOLLOWS_LOSS and training.eval_steps == 0:
        yield (
            ("training.lr_scheduler_type", "training.eval_steps"),
            f"{training.lr_scheduler_type} follows the held-out loss during training, and eval_steps is 0. Set"
            " training.eval_steps, and data.eval_file or data.eval_fraction.",
        )


def trackers(config: Config, given: frozenset[str]) -> Contradictions:
    """Services that a run reports to are named one by one: data leaves the machine only when asked to."""
    names = config.logging.trackers
    if "all" in names:
        yield ("logging.report_to",), "must name each service: 'all' is not supported."
    elif unknown := [name for name in names if name not in TRACKERS]:
        near = difflib.get_close_matches(unknown[0], TRACKERS, n=1)
        nearest = f" Nearest is {near[0]}." if near else ""
        yield ("logging.report_to",), f"unknown: {unknown[0]}.{nearest} Use tensorboard, {', '.join(TRACKERS)}."


def user_code(config: Config, given: frozenset[str]) -> Contradictions:
    """Python code that a configuration names runs only with permission, and a metric has answers to score."""
    logging = config.logging
    named = {"logging.metric": [logging.metric] if logging.metric else [], "logging.callbacks": logging.callbacks or []}
    for key, entries in named.items():
        wrong = next((entry for entry in entries if not USER_CODE.fullmatch(entry)), None)
        if wrong is not None:
            form = "package.module:function" if key == "logging.metric" else "package.module:Class"
            yield (key,), f"{wrong!r} must be of the form {form}."
        elif entries and not logging.trust_code:
            yield (
                (key, "logging.trust_code"),
                "it names Python code, which would run in the training process. Set logging.trust_code: true to allow"
                " it, or remove it.",
            )
    if logging.trust_code and not any(named.values()):
        yield (
            ("logging.trust_code", *named),
            "trust_code has no effect without logging.metric or logging.callbacks. Remove it."
            " (Code that comes with a model is model.trust_remote_code.)",
        )
    if logging.metric and logging.generate_samples == 0:
        text = "the metric scores answers, and generate_samples is 0. Set logging.generate_samples."
        yield ("logging.metric", "logging.generate_samples"), text
    if logging.metric and not (config.demo or _changed(config, HELD_OUT)):
        yield (
            ("logging.metric", *HELD_OUT),
            "the metric scores answers to held-out prompts, and no rows are held out. Set data.eval_file or"
            " data.eval_fraction.",
        )


def output_folder(config: Config, given: frozenset[str]) -> Contradictions:
    """Resume or overwrite."""
    if config.training.resume_from_checkpoint and config.training.overwrite_output_dir:
        text = "the first continues a run, the second discards what is in output_dir. Keep one."
        yield ("training.resume_from_checkpoint", "training.overwrite_output_dir"), text
    if config.training.resume_with_changes and not config.training.resume_from_checkpoint:
        text = "resume_with_changes needs a checkpoint to resume from. Set resume_from_checkpoint, or remove it."
        yield ("training.resume_with_changes", "training.resume_from_checkpoint"), text


def batch_size(config: Config, given: frozenset[str]) -> Contradictions:
    """The global batch must be a multiple of what one rank processes per optimizer step."""
    training = config.training
    per_rank = (training.per_device_train_batch_size or 1) * (training.gradient_accumulation_steps or 1)
    if training.global_batch_size is not None and training.global_batch_size % per_rank:
        yield (
            (
                "training.global_batch_size",
                "training.per_device_train_batch_size",
                "training.gradient_accumulation_steps",
            ),
            f"global_batch_size {training.global_batch_size} is not a multiple of per_device_train_batch_size x"
            f" gradient_accumulation_steps = {per_rank}, so no number of GPUs fits. Remove one of them.",
        )


# What transformers names, and this program cannot train with: a step is the gradient of all micro-batches and ranks.
IN_BACKWARD = ("lomo", "adalomo", *(f"galore_{name}_layerwise" for name in ("adamw", "adamw_8bit", "adafactor")))
IN_BACKWARD += ("apollo_adamw_layerwise",)
OPTIM_ARGS = re.compile(r"\s*\w+\s*=[^,=]+(,\s*\w+\s*=[^,=]+)*")


def why_optimizer_unusable(name: str, target_modules: object) -> str | None:
    """Why an optimizer of transformers cannot be used, and what to do; None if it can.

    Args:
        target_modules: the field `optim_target_modules`.
    """
    if name in IN_BACKWARD:
        base = name.removesuffix("_layerwise")
        return (
            f"{name} changes the weights during the backward pass, before the gradients of all micro-batches and GPUs"
            f" are added up. Choose another{f', such as {base}' if base != name else ''}."
        )
    if name.startswith(("galore_", "apollo_")) and not target_modules:
        return f"{name} needs the modules that it projects. Set optim_target_modules, such as all-linear."
    return None


def optimizer(config: Config, given: frozenset[str]) -> Contradictions:
    """An optimizer that steps once per global batch, with the arguments it needs."""
    training = config.training
    if (why := why_optimizer_unusable(training.optim, training.extra.get("optim_target_modules"))) is not None:
        yield ("training.optim",), why
    arguments = training.extra.get("optim_args")
    if isinstance(arguments, str) and not OPTIM_ARGS.fullmatch(arguments):
        yield ("training.optim_args",), f"{arguments!r} must be of the form name=value, name=value."


# Fields of SFTConfig with a range that transformers does not check: the lowest value, and one above all.
RANGES = {
    "adam_beta1": (0, 1),
    "adam_beta2": (0, 1),
    "adam_epsilon": (0, math.inf),
    "neftune_noise_alpha": (0, math.inf),
    "dataloader_num_workers": (0, 1025),  # processes
    "dataloader_prefetch_factor": (1, math.inf),
    "ddp_bucket_cap_mb": (1, math.inf),
    "router_aux_loss_coef": (0, math.inf),
    "torch_empty_cache_steps": (1, math.inf),
}


# Arguments of torch.utils.checkpoint that a configuration can write.
CHECKPOINTING = ("use_reentrant", "preserve_rng_state", "early_stop")


def checkpointing(config: Config, given: frozenset[str]) -> Contradictions:
    """The kind of recomputation that the backend has, and its arguments."""
    key, kind = "training.gradient_checkpointing_kwargs", config.training.gradient_checkpointing
    arguments = config.training.extra.get("gradient_checkpointing_kwargs") or {}
    for name in arguments:
        if name in (OFFLOAD, SELECTIVE):  # as transformers and TRL name them there
            yield (key,), f"`{name}` cannot be set here: use training.gradient_checkpointing: {name}."
        elif name not in CHECKPOINTING:
            yield (key,), f"unknown argument `{show(name)}`. It takes {', '.join(CHECKPOINTING)}."
    if arguments.get("use_reentrant") and kind in (OFFLOAD, SELECTIVE, AUTO):
        text = f"gradient_checkpointing {kind} needs use_reentrant: false. Remove use_reentrant."
        yield (key, "training.gradient_checkpointing"), text
    found = config.training.leaves_activations_open or kind in checkpointing_kinds("unsloth")
    if config.model.backend == "unsloth" and not found:
        other = "unsloth, which offloads in Unsloth's own way" if kind == OFFLOAD else "true or unsloth"
        yield (
            ("model.backend", "training.gradient_checkpointing"),
            f'gradient_checkpointing "{kind}" needs the transformers backend. Set backend to transformers, or '
            f"gradient_checkpointing to {other}.",
        )


def ranges(config: Config, given: frozenset[str]) -> Contradictions:
    """Numbers of SFTConfig that are out of range."""
    for key, (lowest, above) in RANGES.items():
        value = config.training.extra.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and not lowest <= value < above:
            most = "" if above == math.inf else f" and below {above}"
            yield (f"training.{key}",), f"must be at least {lowest}{most}, got {value}."


# Optimizers that can round stochastically: torchao's, and torch's AdamW in torchao's form.
STOCHASTIC_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adamw_torch_8bit")


def master_weights(config: Config, given: frozenset[str]) -> Contradictions:
    """Stochastic rounding needs bfloat16 weights and an optimizer that has it."""
    training = config.training
    if training.master_weights in ("stochastic", "none") and config.model.dtype == "float16":
        yield (
            ("training.master_weights", "model.dtype"),
            f"float16 gradients need float32 weights, and master_weights is {training.master_weights}. Set it to auto.",
        )
    if training.master_weights == "stochastic" and config.model.dtype == "float32":
        text = "float32 weights are not rounded. Remove master_weights: stochastic, or set dtype: bfloat16."
        yield ("training.master_weights", "model.dtype"), text
    if training.master_weights == "stochastic" and training.optim not in STOCHASTIC_OPTIMIZERS:
        text = f"optim {training.optim} cannot round stochastically. Set one of {', '.join(STOCHASTIC_OPTIMIZERS)}."
        yield ("training.master_weights", "training.optim"), text


# Optimizers whose states are tensors of their parameter's shape, and whose step is the same for each part of it.
SHARDED_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adamw_torch_8bit", "sgd")


def transformers_only(config: Config, given: frozenset[str]) -> Contradictions:
    """What only the transformers backend has: a sharded model, and GPUs that share rows."""
    training = config.training
    needs = {"training.strategy": "a sharded model is trained"} if training.strategy == "shard" else {}
    needs |= {"training.context_parallel": "rows are shared"} if training.context_parallel > 1 else {}
    for key, what in needs.items():
        if config.model.backend == "unsloth":
            text = f"{what} with the transformers backend. Set backend to auto or transformers."
            yield (key, "model.backend"), text
        if training.gradient_checkpointing == "unsloth" and "training.gradient_checkpointing" in given:
            yield (
                (key, "training.gradient_checkpointing"),
                f'{what} with the transformers backend, which has no "unsloth" checkpointing. Set'
                " gradient_checkpointing to offload, true, selective or false.",
            )


def sharding(config: Config, given: frozenset[str]) -> Contradictions:
    """What a sharded model cannot be or have."""
    model, lora, training = config.model, config.lora, config.training
    if training.strategy != "shard":
        for name in _changed(config, ["training.shard_reduce"]):
            text = "shard_reduce applies only to a sharded model. Set strategy: shard, or remove it."
            yield (name, "training.strategy"), text
        return
    if model.dtype == "float16":
        text = "float16 needs a loss scale that all shards share, which is not supported. Set dtype to bfloat16."
        yield ("training.strategy", "model.dtype"), text
    for name in ("load_in_8bit", "load_in_fp8"):
        if getattr(model, name):
            text = f"sharding {name} weights is not supported. Remove it, set load_in_4bit, or set strategy to ddp."
            yield ("training.strategy", f"model.{name}"), text
    if lora.modules_to_save:
        yield (
            ("training.strategy", "lora.modules_to_save"),
            "modules_to_save keeps a second copy of a module next to the sharded one, which is not supported. Remove "
            "it, or set model.full_finetuning.",
        )
    for name, harmless in (("use_dora", (False,)), ("init_lora_weights", (True, False, "gaussian"))):
        if lora.adapter_kwargs.get(name, harmless[0]) not in harmless:
            text = f"{name} computes with the whole base weights, which no rank has. Remove it, or set strategy to ddp."
            yield ("training.strategy", "lora.adapter_kwargs"), text
    if training.optim not in SHARDED_OPTIMIZERS:
        yield (
            ("training.strategy", "training.optim"),
            f"optim {training.optim} is not supported on a sharded model. Set one of {', '.join(SHARDED_OPTIMIZERS)}.",
        )
    if "block_size" in str(training.extra.get("optim_args")):
        text = "the checkpoints of a sharded model have 8-bit states in blocks of 256. Remove block_size."
        yield ("training.strategy", "training.optim_args"), text


def context_parallelism(config: Config, given: frozenset[str]) -> Contradictions:
    """What GPUs that share rows cannot have."""
    model, training, key = config.model, config.training, "training.context_parallel"
    if training.context_parallel == 1:
        return
    if training.strategy in ("auto", "single"):
        text = f"strategy {training.strategy} places whole rows on each GPU. Set it to ddp, shard or null."
        yield (key, "training.strategy"), text
    if model.attn_implementation is not None:
        text = "context parallelism replaces the model's attention implementation. Remove attn_implementation."
        yield (key, "model.attn_implementation"), text
    if training.extra.get("torch_compile"):
        text = "the exchange between GPUs is not compiled. Remove torch_compile, or set context_parallel to 1."
        yield (key, "training.torch_compile"), text
    if training.extra.get("neftune_noise_alpha"):
        yield (
            (key, "training.neftune_noise_alpha"),
            "the noise depends on the length of a row, of which each GPU has a part. Remove it, or set"
            " context_parallel to 1.",
        )


RULES: tuple[Rule, ...] = (
    precision,
    unsloth_only,
    managed_arguments,
    adapter_arguments,
    adapter,
    adapter_modules,
    training_data,
    mixtures,
    held_out_rows,
    loss_mask,
    trained_messages,
    packing,
    optimizer,
    checkpointing,
    ranges,
    master_weights,
    run_length,
    best_model,
    trackers,
    user_code,
    output_folder,
    batch_size,
    transformers_only,
    sharding,
    context_parallelism,
)
