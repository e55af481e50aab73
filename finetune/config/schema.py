"""What can be configured: one frozen section per topic, each field with its type, default, range and one-line help.

`contradictions` holds the rules between fields, `resolve_batch` the one number that also depends on the world size.
Nothing here imports torch: a bad configuration is refused before anything heavy starts.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from finetune.errors import UserError

Range = tuple[str, Callable[[Any], bool]]  # in words, and as a test

AT_LEAST_0: Range = ("at least 0", lambda value: value >= 0)
AT_LEAST_1: Range = ("at least 1", lambda value: value >= 1)
ABOVE_0: Range = ("above 0", lambda value: value > 0)
FRACTION: Range = ("in [0, 1)", lambda value: 0 <= value < 1)
STEPS_OR_OFF: Range = ("-1 (off) or at least 1", lambda value: value == -1 or value >= 1)
SEED: Range = ("in [0, 2**32)", lambda value: 0 <= value < 2**32)  # what numpy.random.seed takes
NOT_EMPTY: Range = ("not empty", lambda value: len(value) > 0)


class ConfigError(UserError):
    """Everything that is wrong with a configuration: `problems` has one text per mistake."""

    def __init__(self, problems: Iterable[str]):
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        lines = [f"The configuration has {count}; nothing was started.", *(f"  - {text}" for text in self.problems)]
        super().__init__("\n".join(lines))


def _setting(default: Any, help: str, allowed: Range | None = None) -> Any:
    """A field with its one-line help and, for a value that is not None, the range it must lie in."""
    metadata = {"help": help, "allowed": allowed}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is loaded."""

    model_name_or_path: str | None = _setting(None, "Hub name or local folder; null runs the embedded demo.", NOT_EMPTY)
    revision: str | None = _setting(None, "Branch, tag or commit on the hub.")
    backend: Literal["auto", "unsloth", "transformers"] = _setting(
        "auto", "auto takes Unsloth where it imports and supports the device, else transformers."
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = _setting(
        "auto", "Compute type; auto takes bfloat16 where the device has it."
    )
    load_in_4bit: bool = _setting(False, "QLoRA: the frozen base model in 4 bits (NF4).")
    load_in_8bit: bool = _setting(False, "The frozen base model in 8 bits (LLM.int8), instead of load_in_4bit.")
    full_finetuning: bool = _setting(False, "Train every weight; no adapter.")
    attn_implementation: str | None = _setting(None, "Attention kernel by its transformers name; null lets it choose.")
    chat_template: str | None = _setting(
        None,
        "Template name or Jinja file; null is the tokenizer's own; none joins prompt and completion as they are.",
    )
    trust_remote_code: bool = _setting(False, "Run Python code that ships with the model.")
    loader: Literal["FastLanguageModel", "FastModel"] | None = _setting(
        None, "Unsloth class that loads the model; null is FastLanguageModel."
    )
    loader_kwargs: dict[str, Any] = _setting(
        {}, "Further arguments of that class's from_pretrained, such as {unsloth_tiled_mlp: true}."
    )


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The adapter; not with model.full_finetuning."""

    r: int = _setting(16, "Rank of the adapter.", AT_LEAST_1)
    lora_alpha: int = _setting(
        16, "The adapter's output is scaled by lora_alpha / r (by / sqrt(r) with use_rslora).", AT_LEAST_1
    )
    lora_dropout: float = _setting(0.0, "Dropout before the adapter; Unsloth's fast kernels need 0.", FRACTION)
    target_modules: list[str] | str | None = _setting(
        None, 'Module names, a PEFT regular expression, or "all-linear"; null is the seven projections.', NOT_EMPTY
    )
    modules_to_save: list[str] | None = _setting(
        None, "Modules trained in full beside the adapter, such as embed_tokens."
    )
    use_rslora: bool = _setting(False, "Rank-stabilised LoRA: scale by 1 / sqrt(r).")
    bias: Literal["none", "all", "lora_only"] = _setting(
        "none", "Biases that are trained: none, all of the model, or those of the adapted modules."
    )
    random_state: int | None = _setting(None, "Seed of the adapter's start; null is training.seed.", SEED)
    adapter_kwargs: dict[str, Any] = _setting(
        {}, "Further arguments of get_peft_model, or of PEFT's LoraConfig, such as {finetune_mlp_modules: false}."
    )
    continue_adapter: bool = _setting(False, "Go on training the adapter that model.model_name_or_path points to.")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which rows, and how a row becomes tokens and labels."""

    train_file: str | list[str] | None = _setting(None, "Path or glob, or a list of them.", NOT_EMPTY)
    weights: list[float] | None = _setting(
        None, "How often the rows of each train_file come in an epoch: 2 is twice, 0.5 half of them; null is once each."
    )
    dataset_name: str | None = _setting(None, "Data set on the hub, instead of train_file.", NOT_EMPTY)
    dataset_config: str | None = _setting(None, "Configuration of the hub data set, such as main.")
    split: str = _setting("train", "Split to train on.")
    eval_file: str | list[str] | None = _setting(None, "Held-out rows: path or glob, or a list of them.", NOT_EMPTY)
    eval_fraction: float = _setting(0.0, "Share of the training rows to hold out instead of an eval_file.", FRACTION)
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text"] = _setting(
        "auto", "Row format; auto detects it and says what it found."
    )
    columns: dict[str, str] = _setting({}, "Role -> column of the file, as in {prompt: question, completion: answer}.")
    system_prompt: str | None = _setting(None, "System message for rows that bring none.")
    max_length: int = _setting(2048, "Longest document, in tokens.", AT_LEAST_1)
    over_length: Literal["truncate", "drop", "split"] = _setting("truncate", "What happens to a longer document.")
    assistant_only_loss: bool = _setting(True, "Learn the assistant's turns only.")
    last_turn_only: bool = _setting(False, "Of these turns, learn the last one only.")
    instruction_part: str | None = _setting(
        None, "In rows of text: what opens a turn that is not learnt; ends what response_part opens.", NOT_EMPTY
    )
    response_part: str | None = _setting(
        None,
        "In rows of text: what opens a turn that is learnt; the rest is not. auto finds both in the chat template.",
        NOT_EMPTY,
    )
    packing: bool = _setting(False, "Fill rows of pack_length tokens with whole documents; a batch then counts packs.")
    pack_length: int | None = _setting(None, "Tokens per pack; null is max_length.", AT_LEAST_1)
    num_proc: int | None = _setting(None, "Processes that tokenise; null takes every core.", AT_LEAST_1)
    cache_dir: str | None = _setting(None, "Where tokenised data is kept; null is the user's cache folder.")

    @property
    def row_length(self) -> int:
        """Tokens of the longest row: a pack, or a document."""
        return (self.pack_length or self.max_length) if self.packing else self.max_length


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The optimisation. Any further field of TRL's SFTConfig is accepted here by its own name."""

    output_dir: str = _setting("outputs", "Folder for checkpoints, the final model, runs/ and run.json.", NOT_EMPTY)
    global_batch_size: int | None = _setting(
        None, "Rows (or packs) per optimiser step over all GPUs; null is 16, or follows the accumulation.", AT_LEAST_1
    )
    per_device_train_batch_size: int | None = _setting(
        None, "Rows per GPU and forward pass; null is the largest divisor up to 8.", AT_LEAST_1
    )
    gradient_accumulation_steps: int | None = _setting(
        None, "Forward passes per optimiser step; null follows from global_batch_size.", AT_LEAST_1
    )
    per_device_eval_batch_size: int = _setting(8, "Rows per GPU in evaluation; does not change its result.", AT_LEAST_1)
    num_train_epochs: float = _setting(1.0, "Passes over the data.", ABOVE_0)
    max_steps: int = _setting(-1, "Optimiser steps, instead of num_train_epochs; -1 is off.", STEPS_OR_OFF)
    learning_rate: float = _setting(2e-4, "Peak learning rate; full fine-tuning wants about a tenth.", ABOVE_0)
    learning_rate_rule: Literal["none", "linear", "square_root"] = _setting(
        "none", "How learning_rate follows global_batch_size over base_global_batch_size; none: it stays as it is."
    )
    base_global_batch_size: int | None = _setting(
        None, "The global batch that learning_rate was chosen for; for learning_rate_rule.", AT_LEAST_1
    )
    lr_scheduler_type: str = _setting("cosine", "Schedule by its transformers name.")
    warmup_steps: float = _setting(0.0, "Steps of warm-up; below 1 it is a share of all steps.", AT_LEAST_0)
    weight_decay: float = _setting(0.0, "Decoupled weight decay.", AT_LEAST_0)
    optim: str = _setting("adamw_torch_fused", "Optimiser by its transformers name, such as adamw_8bit.")
    max_grad_norm: float = _setting(1.0, "Clip the gradient's norm to this; 0 is off.", AT_LEAST_0)
    seed: int = _setting(42, "Decides the adapter's start, the dropout and the order of the data.", SEED)
    gradient_checkpointing: Literal["unsloth"] | bool = _setting(
        "unsloth", "Recompute activations: Unsloth's offloaded kind, the stock kind (true), or not at all (false)."
    )
    save_steps: int = _setting(500, "Steps between checkpoints; 0 saves at the end only.", AT_LEAST_0)
    save_total_limit: int | None = _setting(3, "Checkpoints kept; null keeps all.", AT_LEAST_1)
    eval_steps: int = _setting(0, "Steps between evaluations; 0 evaluates before and after only.", AT_LEAST_0)
    resume_from_checkpoint: bool | str = _setting(False, "true takes the newest whole checkpoint; or a path.")
    resume_with_changes: bool = _setting(
        False, "Resume although settings that change the result (learning_rate, lora_alpha, ...) differ; they apply."
    )
    ddp_timeout: int = _setting(1800, "Seconds that a rank waits for the others.", AT_LEAST_1)
    strategy: Literal["auto", "single", "ddp"] | None = _setting(
        None, "Number of GPUs: auto starts as many as pay, single one, ddp all; null stays as it was launched."
    )
    overwrite_output_dir: bool = _setting(False, "Start anew in an output_dir that holds another run.")
    # Not a key of its own: the SFTConfig fields that were given under `training:` and are none of the above.
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def adam_in_full(self) -> bool:
        """Whether the optimiser keeps Adam's two states as wide as the weights."""
        return self.optim in ("adamw_torch", "adamw_torch_fused")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What a run tells about itself."""

    logging_steps: int = _setting(10, "Optimiser steps between two records.", AT_LEAST_1)
    profile_steps: int = _setting(0, "Steps to trace with the torch profiler, after the third; 0 is off.", AT_LEAST_0)
    generate_samples: int = _setting(
        3, "Answers of the model shown after training where rows have references; 0 is off.", AT_LEAST_0
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting("warning", "Least severe message that is shown.")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A resolved configuration: five sections, and facts about the command line that gave it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    config_file: str | None = None
    dry_run: bool = False
    json: Path | None = None
    script: str | None = None  # whose function makes the rows where neither train_file nor dataset_name is given
    # Dotted names of what the user wrote; the rest are defaults.
    given: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def demo(self) -> bool:
        """Whether the embedded demo runs: no model was named."""
        return self.model.model_name_or_path is None

    @property
    def rows_from_script(self) -> bool:
        """Whether the script's function makes the training rows."""
        return self.script is not None and self.data.train_file is None and self.data.dataset_name is None

    def to_dict(self) -> dict[str, Any]:
        """The sections and `config_file`, made of what YAML and JSON know. `dry_run`, `json`, `script` and `given` are
        left out: they belong to one invocation, not to the configuration."""
        return {name: asdict(getattr(self, name)) for name in SECTIONS} | {"config_file": self.config_file}

    @classmethod
    def from_dict(cls, resolved: Mapping[str, Any]) -> "Config":
        """The inverse of `to_dict`. Raises ConfigError on names that this version does not have."""
        unknown = [name for name in resolved if name not in SECTIONS and name != "config_file"]
        for name, section in SECTIONS.items():
            known = {item.name for item in fields(section)}
            unknown += [f"{name}.{key}" for key in resolved.get(name, {}) if key not in known]
        if unknown:
            raise ConfigError(f"saved configuration: `{name}` is not known to this version" for name in unknown)
        sections = {name: section(**resolved.get(name, {})) for name, section in SECTIONS.items()}
        return cls(**sections, config_file=resolved.get("config_file"))


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "lora": LoraConfig,
    "data": DataConfig,
    "training": TrainingConfig,
    "logging": LoggingConfig,
}

# What the embedded demo brings itself: given without a model it would have no effect.
_NEEDS_A_MODEL = (
    "model.revision",
    "model.chat_template",
    "lora.continue_adapter",
    "data.train_file",
    "data.dataset_name",
    "data.dataset_config",
    "data.weights",
    "data.eval_file",
    "data.eval_fraction",
    "data.format",
    "data.columns",
    "data.system_prompt",
    "data.instruction_part",
    "data.response_part",
)

# Arguments of the loader and of get_peft_model that this program gives itself, with where to say it instead.
_MANAGED_ARGUMENTS = {
    "model.loader_kwargs": {
        "model_name pretrained_model_name_or_path": "use model.model_name_or_path",
        "max_seq_length": "use data.max_length",
        "dtype torch_dtype": "use model.dtype",
        "load_in_4bit": "use model.load_in_4bit",
        "load_in_8bit": "use model.load_in_8bit",
        "quantization_config": "use model.load_in_4bit or model.load_in_8bit",
        "full_finetuning": "use model.full_finetuning",
        "revision": "use model.revision",
        "trust_remote_code": "use model.trust_remote_code",
        "attn_implementation": "use model.attn_implementation",
        "use_gradient_checkpointing": "use training.gradient_checkpointing",
        "random_state": "use training.seed, and lora.random_state for the adapter",
        "token use_auth_token": "no token stands in a configuration: run `hf auth login`, or set the variable HF_TOKEN",
        "device_map device_map_planner_kwargs max_memory": "each rank loads the whole model onto its own device",
        "fast_inference gpu_memory_utilization float8_kv_cache disable_log_stats max_lora_rank": (
            "they belong to generation with vLLM, which does not run beside the training"
        ),
        "auto_model on_model_resolved": "the model is loaded for causal language modelling",
    },
    "lora.adapter_kwargs": {
        "r lora_alpha lora_dropout target_modules modules_to_save use_rslora bias random_state": "use lora.{name}",
        "use_gradient_checkpointing": "use training.gradient_checkpointing",
        "max_seq_length": "use data.max_length",
        "model peft_config": "use model.model_name_or_path",
        "task_type peft_type inference_mode": "the adapter is a LoRA that is trained for causal language modelling",
        "base_model_name_or_path revision": "use model.model_name_or_path and model.revision",
    },
}


def _managed_arguments(name: str, given: Mapping[str, Any]) -> list[str]:
    """One text for each of the `given` arguments that cannot be given under `name`."""
    reasons = {key: why for keys, why in _MANAGED_ARGUMENTS[name].items() for key in keys.split()}
    return [f"`{key}` cannot be given here; {reasons[key].format(name=key)}" for key in given if key in reasons]


def _is_default(config: Config, name: str) -> bool:
    section, key = name.split(".")
    return getattr(getattr(config, section), key) == getattr(SECTIONS[section](), key)


def contradictions(config: Config, given: frozenset[str]) -> list[tuple[tuple[str, ...], str]]:
    """Settings that exclude each other.

    Args:
        config: values that are each valid on their own.
        given: the dotted names that the user wrote; the others are defaults and cannot contradict anything.

    Returns:
        One `(names, text)` for each: the dotted names it is about, and what to do.
    """
    model, data, training = config.model, config.data, config.training
    found: list[tuple[tuple[str, ...], str]] = []

    def refuse(*names: str, because: str) -> None:
        found.append((names, because))

    if model.full_finetuning and model.load_in_4bit:
        refuse(
            "model.full_finetuning",
            "model.load_in_4bit",
            because="4-bit weights cannot be trained in full; choose full_finetuning, or load_in_4bit with an adapter",
        )
    if model.load_in_8bit and (model.load_in_4bit or model.full_finetuning):
        other = "model.load_in_4bit" if model.load_in_4bit else "model.full_finetuning"
        refuse("model.load_in_8bit", other, because="the weights are held in 4 bits, in 8, or in full; keep one")
    if model.loader_kwargs.get("load_in_16bit") and (model.load_in_4bit or model.load_in_8bit):
        other = "model.load_in_4bit" if model.load_in_4bit else "model.load_in_8bit"
        refuse("model.loader_kwargs", other, because="load_in_16bit and fewer bits exclude each other; keep one")
    if model.backend == "transformers":
        for name in ("model.loader", "model.loader_kwargs"):
            if not _is_default(config, name):
                refuse(name, "model.backend", because=f"{name} is for Unsloth's classes; remove it, or the backend")
    for name, arguments in (
        ("model.loader_kwargs", model.loader_kwargs),
        ("lora.adapter_kwargs", config.lora.adapter_kwargs),
    ):
        for because in _managed_arguments(name, arguments):
            refuse(name, because=because)
    lora_given = tuple(sorted(name for name in given if name.startswith("lora.")))
    if model.full_finetuning and lora_given:
        refuse(
            "model.full_finetuning",
            *lora_given,
            because="full fine-tuning has no adapter; remove full_finetuning or the `lora:` settings",
        )
    fixed = tuple(n for n in ("bias", "random_state", "adapter_kwargs") if not _is_default(config, f"lora.{n}"))
    if config.lora.continue_adapter and fixed:
        refuse(
            "lora.continue_adapter",
            *(f"lora.{name}" for name in fixed),
            because="continue_adapter keeps the adapter as it was made; remove the others",
        )
    if model.backend == "transformers" and training.gradient_checkpointing == "unsloth":
        refuse(
            "model.backend",
            "training.gradient_checkpointing",
            because='"unsloth" checkpointing needs the unsloth backend; use true for the stock kind, or false',
        )

    sources = ("data.train_file", "data.dataset_name")
    if data.train_file is not None and data.dataset_name is not None:
        refuse(*sources, because="both name the training data; keep one")
    if config.demo:
        without_model = tuple(name for name in _NEEDS_A_MODEL if name in given and not _is_default(config, name))
        if without_model:
            refuse(
                *without_model,
                "model.model_name_or_path",
                because="the embedded demo, which runs without model.model_name_or_path, brings its own model and data;"
                " set model.model_name_or_path, or remove these",
            )
    elif data.train_file is None and data.dataset_name is None and config.script is None:
        refuse(
            "model.model_name_or_path",
            *sources,
            because="a model is named and no training data; set data.train_file or data.dataset_name",
        )
    elif data.dataset_config is not None and data.dataset_name is None:
        refuse(
            "data.dataset_config",
            "data.dataset_name",
            because="dataset_config belongs to a hub data set; set data.dataset_name, or remove it",
        )
    if data.weights is not None:
        files = [data.train_file] if isinstance(data.train_file, str) else data.train_file or []
        if len(data.weights) != len(files) or not all(weight > 0 and math.isfinite(weight) for weight in data.weights):
            refuse(
                "data.weights",
                "data.train_file",
                because=f"one weight above 0 is needed for each of the {len(files)} entries of data.train_file",
            )
    if data.eval_file is not None and data.eval_fraction > 0:
        refuse("data.eval_file", "data.eval_fraction", because="both choose the held-out rows; keep one")
    may_hold_out = config.demo or config.rows_from_script or data.eval_file is not None or data.eval_fraction > 0
    if training.eval_steps > 0 and not may_hold_out:
        refuse(
            "training.eval_steps",
            "data.eval_file",
            "data.eval_fraction",
            because="eval_steps is set and no rows are held out; set data.eval_file or data.eval_fraction",
        )
    if data.last_turn_only and not data.assistant_only_loss:
        refuse(
            "data.last_turn_only",
            "data.assistant_only_loss",
            because="last_turn_only picks one of the assistant's turns; it needs assistant_only_loss: true",
        )
    if data.instruction_part is not None and data.response_part is None:
        refuse("data.instruction_part", "data.response_part", because="instruction_part needs a response_part")
    if data.response_part == "auto" and data.instruction_part is not None:
        refuse(
            "data.response_part",
            "data.instruction_part",
            because="response_part: auto finds both markers in the chat template; give both, or auto alone",
        )
    if data.response_part is not None and data.format not in ("auto", "text"):
        refuse(
            "data.response_part",
            "data.format",
            because=f"the turns of rows of the format {data.format} are known without markers, which are for text;"
            " remove response_part and instruction_part, or set data.format to text",
        )
    if data.response_part is not None and not data.assistant_only_loss:
        refuse(
            "data.response_part",
            "data.assistant_only_loss",
            because="response_part says which part is learnt, and assistant_only_loss: false that all is; keep one",
        )
    if data.pack_length is not None and not data.packing:
        refuse("data.pack_length", "data.packing", because="pack_length needs packing: true")
    elif data.pack_length is not None and data.pack_length < data.max_length:
        refuse(
            "data.pack_length",
            "data.max_length",
            because=f"pack_length {data.pack_length} is below max_length {data.max_length}: the longest document would"
            " not fit in a pack; raise pack_length or lower max_length",
        )

    lengths = ("training.max_steps", "training.num_train_epochs")
    if training.max_steps > 0 and given.issuperset(lengths):
        refuse(*lengths, because="both set the length of the run; keep one (max_steps: -1 is off)")
    if training.resume_from_checkpoint and training.overwrite_output_dir:
        refuse(
            "training.resume_from_checkpoint",
            "training.overwrite_output_dir",
            because="one continues the run in output_dir and the other discards it; keep one",
        )
    if training.resume_with_changes and not training.resume_from_checkpoint:
        refuse(
            "training.resume_with_changes",
            "training.resume_from_checkpoint",
            because="resume_with_changes needs a checkpoint to resume from; set resume_from_checkpoint, or remove it",
        )
    rule = ("training.learning_rate_rule", "training.base_global_batch_size")
    if (training.learning_rate_rule == "none") != (training.base_global_batch_size is None):
        refuse(
            *rule,
            because="learning_rate_rule linear or square_root and base_global_batch_size, the batch that learning_rate"
            " was chosen for, need each other; give both, or neither",
        )
    per_rank = (training.per_device_train_batch_size or 1) * (training.gradient_accumulation_steps or 1)
    if training.global_batch_size is not None and training.global_batch_size % per_rank:
        refuse(
            "training.global_batch_size",
            "training.per_device_train_batch_size",
            "training.gradient_accumulation_steps",
            because=f"global_batch_size {training.global_batch_size} is not a multiple of per_device_train_batch_size x"
            f" gradient_accumulation_steps = {per_rank} on any number of GPUs; leave one of them out",
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How one optimiser step is cut: `global_size == per_device * accumulation * world_size`, in rows or packs."""

    per_device: int
    accumulation: int
    global_size: int


DEFAULT_GLOBAL_BATCH = 16
LARGEST_DEFAULT_PER_DEVICE = 8  # also what transformers takes for per_device_train_batch_size
LARGEST_DEFAULT_TOKENS = 16_384  # of packs: 8 rows of the default max_length


def resolve_batch(training: TrainingConfig, world_size: int, data: DataConfig | None = None) -> Batch:
    """Cut the global batch exactly over `world_size` ranks.

    The user fixes `global_batch_size`; with only `gradient_accumulation_steps` given it is per device x accumulation x
    world size, and with neither it is 16. What is left open follows, the per-device size being the largest divisor of
    a rank's share that is at most 8 rows, or with `data.packing` packs of at most 16,384 tokens together.

    Raises:
        UserError: the settings do not multiply to the global batch on this world size. Names the world sizes up to 64
            that would do, and the nearest global sizes.
    """
    per_device, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
    global_size = training.global_batch_size
    most = LARGEST_DEFAULT_PER_DEVICE
    if data is not None and data.packing:
        most = min(most, max(LARGEST_DEFAULT_TOKENS // data.row_length, 1))
    if global_size is None and accumulation is not None:
        per_device = per_device or most
        global_size = per_device * accumulation * world_size
    global_size = global_size or DEFAULT_GLOBAL_BATCH

    fixed = (per_device or 1) * (accumulation or 1)  # rows per rank that the user's own numbers leave no choice in
    all_fixed = per_device is not None and accumulation is not None

    def fits(world: int, size: int) -> bool:
        return size == fixed * world if all_fixed else size % (fixed * world) == 0

    if not fits(world_size, global_size):
        raise UserError(_no_fit(training, world_size, global_size, fixed, all_fixed, fits))
    share = global_size // world_size
    if per_device is None:
        per_device = share // accumulation if accumulation else _largest_divisor(share, most)
    return Batch(per_device=per_device, accumulation=share // per_device, global_size=global_size)


def scaled_learning_rate(training: TrainingConfig, global_size: int) -> float:
    """The peak learning rate for a global batch of `global_size` rows.

    The number of GPUs does not change it, as it does not change the global batch. Who asks for a larger batch may scale
    the rate with k = global_size / base_global_batch_size: linear, by k (Goyal et al. 2017, arXiv 1706.02677, for SGD),
    or square_root, by its root (Krizhevsky 2014, arXiv 1404.5997; for Adam, Malladi et al. 2022, arXiv 2205.10287).
    """
    if training.base_global_batch_size is None:
        return training.learning_rate
    factor = global_size / training.base_global_batch_size
    return training.learning_rate * (factor if training.learning_rate_rule == "linear" else math.sqrt(factor))


def _largest_divisor(number: int, limit: int) -> int:
    return max(divisor for divisor in range(1, limit + 1) if number % divisor == 0)


def _no_fit(
    training: TrainingConfig,
    world_size: int,
    global_size: int,
    fixed: int,
    all_fixed: bool,
    fits: Callable[[int, int], bool],
) -> str:
    unit = fixed * world_size
    below, above = global_size // unit * unit, math.ceil(global_size / unit) * unit
    sizes = [unit] if all_fixed else [size for size in (below, above) if size > 0]
    worlds = [str(world) for world in range(1, 65) if fits(world, global_size)]
    numbers = {
        "training.per_device_train_batch_size": training.per_device_train_batch_size,
        "training.gradient_accumulation_steps": training.gradient_accumulation_steps,
    }
    factors = "".join(f" x {value} ({name})" for name, value in numbers.items() if value is not None)
    origin = "" if training.global_batch_size is not None else " (the default)"
    relation = "is not" if all_fixed else "is not a multiple of"
    return (
        f"training.global_batch_size {global_size}{origin} {relation} {world_size} (processes){factors} = {unit};"
        f" world sizes up to 64 that hold {global_size} exactly: {', '.join(worlds) or 'none'};"
        f" or set training.global_batch_size to {' or '.join(map(str, sizes))}"
        + (", or leave the others out." if factors else ".")
    )
