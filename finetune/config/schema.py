"""What can be configured: one frozen section per topic, each field with its type, default, range and one-line help.

Rules between fields are in `rules.py`, and `batch.py` has what also depends on the world size. Nothing here imports
torch: an invalid configuration is refused before anything heavy starts.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from finetune.config.values import Values
from finetune.errors import UserError
from finetune.text import counted

Range = tuple[str, Callable[[Any], bool]]  # in words, and as a test

AT_LEAST_0: Range = ("at least 0", lambda value: value >= 0)
AT_LEAST_1: Range = ("at least 1", lambda value: value >= 1)
AT_LEAST_2: Range = ("at least 2", lambda value: value >= 2)  # tokens: the first is never supervised
ABOVE_0: Range = ("above 0", lambda value: value > 0)
FRACTION: Range = ("in [0, 1)", lambda value: 0 <= value < 1)
STEPS_OR_OFF: Range = ("-1 (off) or at least 1", lambda value: value == -1 or value >= 1)
SEED: Range = ("in [0, 2**32)", lambda value: 0 <= value < 2**32)  # what numpy.random.seed takes
NOT_EMPTY: Range = ("not empty", lambda value: len(value) > 0)


MOST_PROBLEMS = 30  # that are printed


class ConfigError(UserError):
    """Everything that is wrong with a configuration: one text per mistake in `problems`."""

    def __init__(self, problems: Iterable[str]):
        self.problems = list(problems)
        count = counted(len(self.problems), "problem")
        lines = [f"The configuration has {count}; nothing was started."]
        lines += [f"  - {text}" for text in self.problems[:MOST_PROBLEMS]]
        if len(self.problems) > MOST_PROBLEMS:
            lines.append(f"  - and {len(self.problems) - MOST_PROBLEMS:,} more")
        super().__init__("\n".join(lines))


def _setting(default: Any, help: str, allowed: Range | None = None) -> Any:
    """A field with its one-line help and, for a value that is not None, the range it must lie in."""
    metadata = {"help": help, "allowed": allowed}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model to train, and how it is loaded."""

    model_name_or_path: str | None = _setting(None, "Hub name or local folder.", NOT_EMPTY)
    revision: str | None = _setting(None, "Branch, tag or commit on the Hub.")
    backend: Literal["auto", "unsloth", "transformers"] = _setting(
        "auto", "auto uses Unsloth if it can be imported and supports the device, otherwise plain transformers."
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = _setting(
        "auto",
        "Compute dtype. auto: bfloat16 if the device has units for it; without, float16 on a GPU, float32 on a CPU.",
    )
    load_in_4bit: bool = _setting(False, "QLoRA: load the frozen base model in 4 bits (NF4).")
    load_in_8bit: bool = _setting(False, "Load the frozen base model in 8 bits (LLM.int8).")
    load_in_fp8: bool = _setting(
        False, "Multiply the frozen base model in FP8: faster than 16 bits, in the same memory. Needs Ada or newer."
    )
    full_finetuning: bool = _setting(False, "Train all weights, without an adapter.")
    attn_implementation: str | None = _setting(
        None, "Attention implementation, such as sdpa. null lets the library choose."
    )
    packed_attention: Literal["auto", "torch", "flash_4"] = _setting(
        "auto", "Kernel for packs on a GPU: auto times FlashAttention-4, if installed, against torch's."
    )
    layer_kernels: Literal["auto", "torch", "liger"] = _setting(
        "auto", "Kernels of transformers' layers on a GPU: auto uses Liger's, if installed, where they were compared."
    )
    tiled_mlp: bool = _setting(False, "Compute each MLP in slices of the sequence: long rows in less memory.")
    chat_template: str | None = _setting(
        None,
        "Jinja file, or chatml, chatml_tools, llama3, gemma, mistral or phi. null uses the tokenizer's own; none"
        " concatenates prompt and completion.",
    )
    trust_remote_code: bool = _setting(False, "Allow Python code that comes with the model to run.")
    loader: Literal["FastLanguageModel", "FastModel"] | None = _setting(
        None, "Unsloth class that loads the model. null uses FastLanguageModel."
    )
    loader_kwargs: Values = _setting(
        {}, "Further arguments for from_pretrained of the Unsloth class, such as {offload_embedding: true}."
    )


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The LoRA adapter. Not used in full fine-tuning."""

    r: int = _setting(16, "Rank of the adapter.", AT_LEAST_1)
    lora_alpha: int = _setting(
        16,
        "The adapter's output is scaled by lora_alpha / r, or by lora_alpha / sqrt(r) with use_rslora.",
        AT_LEAST_1,
    )
    lora_dropout: float = _setting(0.0, "Dropout on the adapter's input. Unsloth's fast kernels need 0.", FRACTION)
    target_modules: list[str] | str | None = _setting(
        None,
        'Module names, a PEFT regular expression, or "all-linear". null uses the seven attention and MLP projections.',
    )
    target_parameters: list[str] | None = _setting(
        None, "Stacked experts, such as mlp.experts.down_proj. null: those that target_modules names. [] is none."
    )
    modules_to_save: list[str] | None = _setting(
        None, "Modules trained in full alongside the adapter, such as embed_tokens."
    )
    use_rslora: bool = _setting(False, "Rank-stabilized LoRA: scale by 1 / sqrt(r) instead of 1 / r.")
    bias: Literal["none", "all", "lora_only"] = _setting(
        "none", "Biases to train: none, all, or only those of the adapted modules."
    )
    random_state: int | None = _setting(None, "Seed for the adapter's initial weights. null uses training.seed.", SEED)
    adapter_kwargs: Values = _setting(
        {}, "Further arguments for get_peft_model or PEFT's LoraConfig, such as {finetune_mlp_modules: false}."
    )
    continue_adapter: bool = _setting(False, "Continue training the adapter that model.model_name_or_path points to.")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which rows to train on, and how they become tokens and labels."""

    train_file: str | list[str] | None = _setting(None, "Training rows: a path or glob, or a list of them.", NOT_EMPTY)
    train: list[dict] | None = _setting(
        None, "Training rows from several sources, such as {file: a.csv, format: alpaca, weight: 2}: see docs/data.md."
    )
    dataset_name: str | None = _setting(None, "Dataset on the Hub, instead of train_file.", NOT_EMPTY)
    dataset_config: str | None = _setting(None, "Configuration (subset) of the Hub dataset, such as main.")
    split: str = _setting("train", "Split of the dataset to train on.")
    eval_fraction: float = _setting(
        0.0, "Fraction of the training rows to hold out, instead of an eval_file; others with another seed.", FRACTION
    )
    eval_file: str | list[str] | None = _setting(None, "Held-out rows: a path or glob, or a list of them.", NOT_EMPTY)
    eval: list[dict] | None = _setting(None, "Held-out rows from several sources, written like train.")
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "document", "tokenized"] = (
        _setting("auto", "Row format. auto detects it and prints what it found; document: each .txt file is one.")
    )
    columns: dict[str, str] = _setting({}, "Columns to read, by role, such as {instruction: question, output: answer}.")
    dataset_text_field: str = _setting(
        "text", "Text column. As in TRL, columns of messages, prompts or token ids take precedence.", NOT_EMPTY
    )
    system_prompt: str | None = _setting(None, "System message for rows that have none.")
    max_length: int | None = _setting(2048, "Maximum length of a document, in tokens. null: no limit.", AT_LEAST_2)
    over_length: Literal["truncate", "keep_end", "drop", "split"] | None = _setting(
        None,
        "What to do with longer documents: keep their start or end, drop or split them. null: split raw text (.txt,"
        " .md), truncate other rows.",
    )
    keep_empty: bool = _setting(
        False, "Keep rows with an empty message, completion or text, such as answers that are empty on purpose."
    )
    assistant_only_loss: bool = _setting(True, "Compute the loss on the assistant's turns only.")
    completion_only_loss: bool | None = _setting(
        None, "Rows of prompt and completion: compute the loss on the completion only. null is true for such rows."
    )
    last_turn_only: bool = _setting(False, "Compute the loss only on the last turn that the other settings select.")
    train_on_roles: list[str] | None = _setting(
        None, "Roles whose messages the loss is computed on, with assistant_only_loss. null is [assistant].", NOT_EMPTY
    )
    train_on_tool_calls: bool = _setting(True, "Compute the loss on assistant turns with tool calls.")
    train_on_thinking: bool = _setting(
        True, "Compute the loss on the reasoning of assistant turns (reasoning_content, <think>...</think>)."
    )
    chat_template_kwargs: Values = _setting({}, "Variables for the chat template, such as {enable_thinking: false}.")
    instruction_part: str | None = _setting(
        None,
        "Rows of text: marker that starts a user turn, which is masked from the loss.",
        NOT_EMPTY,
    )
    response_part: str | None = _setting(
        None,
        "Rows of text: marker that starts an assistant turn; the rest is masked. auto: from the chat template.",
        NOT_EMPTY,
    )
    packing: bool = _setting(
        False, "Pack whole documents into rows of pack_length tokens. Batch sizes then count packs."
    )
    pack_length: int | None = _setting(None, "Tokens per pack. null uses max_length.", AT_LEAST_1)
    num_proc: int | None = _setting(None, "Processes that tokenize. null uses all cores.", AT_LEAST_1)
    cache_dir: str | None = _setting(None, "Cache folder for tokenized data. null uses the user's cache folder.")

    @property
    def document_length(self) -> int | None:
        """Tokens of the longest document; None without a limit. A pack limits the documents in it."""
        return self.max_length or (self.pack_length if self.packing else None)

    @property
    def row_length(self) -> int | None:
        """Tokens of the longest row: a pack, or a document; None without a limit, never with packing."""
        return (self.pack_length or self.max_length) if self.packing else self.max_length


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Batches, optimizer and checkpoints. Any other field of TRL's SFTConfig is accepted by its own name."""

    output_dir: str = _setting("outputs", "Folder for checkpoints, model, run.json, TensorBoard's runs/.", NOT_EMPTY)
    global_batch_size: int | None = _setting(
        None,
        "Rows (or packs) per optimizer step over all GPUs. null is 16, or the product if a factor below is given.",
        AT_LEAST_1,
    )
    per_device_train_batch_size: int | None = _setting(
        None,
        "Rows (or packs) per GPU and forward pass. null: on a GPU the fastest that fits, found by a search.",
        AT_LEAST_1,
    )
    gradient_accumulation_steps: int | None = _setting(
        None, "Forward passes per optimizer step and GPU. null follows from global_batch_size.", AT_LEAST_1
    )
    num_train_epochs: float = _setting(1.0, "Passes over the data.", ABOVE_0)
    max_steps: int = _setting(-1, "Optimizer steps, instead of num_train_epochs. -1 is off.", STEPS_OR_OFF)
    learning_rate: float = _setting(2e-4, "Peak learning rate. Use about a tenth for full fine-tuning.", ABOVE_0)
    per_device_eval_batch_size: int = _setting(
        8, "Rows per GPU in evaluation. The result does not depend on it.", AT_LEAST_1
    )
    lr_scheduler_type: str = _setting("cosine", "Learning-rate schedule, by its transformers name.")
    warmup_steps: float = _setting(0.0, "Warm-up steps. Below 1: a fraction of all steps.", AT_LEAST_0)
    weight_decay: float = _setting(0.0, "Decoupled weight decay.", AT_LEAST_0)
    optim: str = _setting("adamw_torch_fused", "Optimizer, by its transformers name, such as adamw_8bit.")
    master_weights: Literal["auto", "float32", "stochastic", "none"] = _setting(
        "auto",
        "Trained weights: float32, stochastic (bfloat16, stochastic rounding) or none. auto: float32 if it fits.",
    )
    max_grad_norm: float = _setting(1.0, "Clip the gradient norm to this value. 0 is off.", AT_LEAST_0)
    seed: int = _setting(42, "Seed for the adapter's initial weights, dropout and data order.", SEED)
    train_sampling_strategy: Literal["random", "group_by_length"] = _setting(
        "random",
        "Order of the rows. group_by_length (without packing): steps of rows of similar length, which learn less well.",
    )
    gradient_checkpointing: Literal["unsloth", "offload", "selective", "auto"] | bool = _setting(
        "unsloth",
        "Recompute activations: false, selective (not attention), true, offload or unsloth (CPU memory); or auto: the "
        "fastest that holds this job, measured.",
    )
    cuda_graphs: Literal["auto"] | bool = _setting(
        "auto",
        "Replay the passes on packs as CUDA graphs. auto: if the host limits them, and the results are the same.",
    )
    save_steps: int = _setting(500, "Steps between checkpoints. 0 saves only at the end.", AT_LEAST_0)
    save_total_limit: int | None = _setting(3, "Number of checkpoints to keep. null keeps all.", AT_LEAST_1)
    eval_steps: int = _setting(0, "Steps between evaluations. 0 evaluates only before and after training.", AT_LEAST_0)
    load_best_model_at_end: bool = _setting(
        False, "End with the weights of the best evaluation. Each new best is saved as a checkpoint."
    )
    metric_for_best_model: Literal["eval_loss", "eval_token_accuracy", "eval_entropy"] | None = _setting(
        None, "Metric that selects the best evaluation. null is eval_loss."
    )
    greater_is_better: bool | None = _setting(
        None, "Whether higher values of the metric are better. null is true for eval_token_accuracy only."
    )
    early_stopping_patience: int | None = _setting(
        None, "End the run after this many evaluations in a row without improvement. null is off.", AT_LEAST_1
    )
    early_stopping_threshold: float = _setting(0.0, "Smallest change that counts as an improvement.", AT_LEAST_0)
    stop_on_divergence: bool = _setting(
        False, "End the run with a checkpoint and an error if its loss diverges, by the rule of `finetune review`."
    )
    resume_from_checkpoint: bool | str = _setting(
        False, "What to resume: true = the newest complete checkpoint in output_dir, or the path of a checkpoint."
    )
    resume_with_changes: bool = _setting(
        False, "Allow settings that affect the result (learning_rate, lora_alpha, ...) to change on resume."
    )
    ddp_timeout: int = _setting(
        600,
        "Seconds that a collective waits for a stuck rank before the run ends. Saving and loading may take longer.",
        AT_LEAST_1,
    )
    strategy: Literal["auto", "single", "ddp", "shard"] | None = _setting(
        None,
        "GPUs: auto = as many as are worth it, single = one, ddp = all, shard = all (sharded), null = as launched.",
    )
    shard_reduce: Literal["auto", "every_pass", "once"] = _setting(
        "auto",
        "With shard: reduce gradients every_pass (less memory) or once per step. auto: once for adapters.",
    )
    context_parallel: int = _setting(
        1, "GPUs that share each row, for rows too long for one: each has a part of its tokens.", AT_LEAST_1
    )
    overwrite_output_dir: bool = _setting(False, "Discard the run in output_dir and start over.")
    # Not a key: the SFTConfig fields that were given under `training:` and are none of the above.
    extra: Values = field(default_factory=dict)

    @property
    def best_metric(self) -> str | None:
        """The metric that the best evaluation is chosen by; None if the run does not track it."""
        tracked = self.load_best_model_at_end or self.early_stopping_patience is not None
        return self.metric_for_best_model or ("eval_loss" if tracked else None)

    @property
    def best_is_greatest(self) -> bool | None:
        """Whether higher values of `best_metric` are better; None without one."""
        if self.best_metric is None or self.greater_is_better is not None:
            return self.greater_is_better
        return self.best_metric == "eval_token_accuracy"

    @property
    def early_stopping(self) -> Values | None:
        """The rule that ends a run early, as run.json has it; None if there is none."""
        if self.early_stopping_patience is None:
            return None
        return {
            "metric": self.best_metric,
            "greater_is_better": self.best_is_greatest,
            "patience": self.early_stopping_patience,
            "threshold": self.early_stopping_threshold,
        }

    @property
    def leaves_activations_open(self) -> bool:
        """Whether the run finds out how activations are kept."""
        return self.gradient_checkpointing == "auto"

    @property
    def adam_in_full(self) -> bool:
        """Whether the optimizer keeps Adam's two states in the precision of the weights."""
        return self.optim in ("adamw_torch", "adamw_torch_fused")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What a run logs and prints."""

    logging_steps: int = _setting(10, "Optimizer steps between log entries.", AT_LEAST_1)
    profile_steps: int = _setting(0, "Steps to trace with torch.profiler, after the first three. 0 is off.", AT_LEAST_0)
    generate_samples: int = _setting(3, "Held-out prompts to answer at each evaluation. 0 is off.", AT_LEAST_0)
    metric: str | None = _setting(
        None, "Function that scores these answers, as package.module:function. Needs trust_code.", NOT_EMPTY
    )
    report_to: list[str] | str = _setting(
        "tensorboard",
        "Trackers such as wandb, mlflow or trackio. TensorBoard is always written.",
        NOT_EMPTY,
    )
    callbacks: list[str] | None = _setting(
        None, "Trainer callback classes, as package.module:Class. Needs trust_code.", NOT_EMPTY
    )
    trust_code: bool = _setting(False, "Allow the Python code that metric and callbacks name to run.")
    include_rows: bool = _setting(
        True,
        "Show text from your data in TensorBoard: sample answers, and one dropped row per reason.",
    )
    lines: bool = _setting(
        False,
        "Keep the figures of past log entries on a terminal, as lines above the bar; unless it is set, those of a run "
        "of at most 100. A log file has them anyway.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting("warning", "Minimum severity of messages.")

    @property
    def trackers(self) -> list[str]:
        """The names in report_to other than TensorBoard and TRL's "none", each once."""
        names = [self.report_to] if isinstance(self.report_to, str) else self.report_to
        return [name for name in dict.fromkeys(names) if name not in ("tensorboard", "none")]


@dataclass(frozen=True, kw_only=True)
class Config:
    """A resolved configuration: five sections, and facts about the command line it came from."""

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    config_file: str | None = None
    demo: bool = False  # the embedded demo's model and data
    dry_run: bool = False
    json: Path | None = None
    # Dotted names that the user wrote; the others are defaults.
    given: frozenset[str] = field(default=frozenset(), compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)  # on former names that were taken

    def to_dict(self) -> Values:
        """The sections and `config_file`, in types of YAML and JSON, without what belongs to one invocation, not to the
        configuration."""
        return {name: asdict(getattr(self, name)) for name in SECTIONS} | {"config_file": self.config_file}

    @classmethod
    def from_dict(cls, resolved: Mapping[str, Any]) -> "Config":
        """The inverse of `to_dict`. Raises ConfigError on names that this version does not know."""
        unknown = [name for name in resolved if name not in SECTIONS and name != "config_file"]
        for name, section in SECTIONS.items():
            known = {item.name for item in fields(section)}
            unknown += [f"{name}.{key}" for key in resolved.get(name, {}) if key not in known]
        if unknown:
            raise ConfigError(f"saved configuration: unknown name in this version: `{name}`." for name in unknown)
        sections = {name: section(**resolved.get(name, {})) for name, section in SECTIONS.items()}
        return cls(**sections, config_file=resolved.get("config_file"))


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "lora": LoraConfig,
    "data": DataConfig,
    "training": TrainingConfig,
    "logging": LoggingConfig,
}

# Dotted name -> field of every key, and -> default. `training.extra` is not one: it has no help.
KEYS: dict[str, Field[Any]] = {
    f"{section}.{item.name}": item
    for section, kind in SECTIONS.items()
    for item in fields(kind)
    if "help" in item.metadata
}
DEFAULTS: Values = {name: item.default if item.default is not MISSING else {} for name, item in KEYS.items()}
