"""Translates TRL's arguments into this project's configuration, which run.json, resume and the review read."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from finetune.config import Batch, Config, data_ranks, resolve_batch
from finetune.config.arguments import REFUSED, TAKEN
from finetune.config.rules import OFFLOAD, SELECTIVE
from finetune.config.schema import (
    SECTIONS,
    DataConfig,
    LoggingConfig,
    LoraConfig,
    ModelConfig,
    TrainingConfig,
)
from finetune.engine.optimizer.master_weights import FLOAT32, NONE, WeightPrecision, count_rounded
from finetune.engine.training.recompute import Recomputation
from finetune.runtime import files
from finetune.runtime.bootstrap import Stack
from finetune.runtime.ranks import distributed
from finetune.runtime.types import JsonObject, Model

if TYPE_CHECKING:
    import trl


_OF_THIS_LAUNCH = ("run_name", "use_cpu")
TRANSFORMERS_TIMEOUT = 1800  # default of `ddp_timeout` in transformers, in seconds


def leaves_micro_batch_open(args: trl.SFTConfig, global_batch_size: int | None) -> bool:
    """Whether the run may choose how many rows a rank holds at once: the step is fixed, and the script has left
    `per_device_train_batch_size` out, which only `finetune.SFTConfig` knows."""
    return global_batch_size is not None and not getattr(args, "size_given", True)


def context_parallel(args: trl.SFTConfig) -> int:
    """How many ranks share each row, which only `finetune.SFTConfig` and the command line can set."""
    return getattr(args, "context_parallel", 1)


def rows_per_rank(args: trl.SFTConfig) -> int:
    """Rows of an optimizer step per rank with rows of its own, as TRL counts them."""
    return args.per_device_train_batch_size * args.gradient_accumulation_steps


def batch(args: trl.SFTConfig, global_batch_size: int | None, world_size: int) -> Batch:
    """How a step divides over the ranks: TRL's product, or what the user has fixed. Of a fixed batch, a rank holds at
    most `per_device_train_batch_size` rows at once.

    Raises:
        UserError: `global_batch_size` or `context_parallel` does not divide over this world size.
    """
    training = TrainingConfig(global_batch_size=global_batch_size, context_parallel=context_parallel(args))
    if global_batch_size is None:
        return Batch(
            per_device=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            global_batch_size=rows_per_rank(args) * data_ranks(training, world_size),
        )
    fixed = resolve_batch(training, world_size)
    per_rank = fixed.per_device * fixed.accumulation
    per_device = max(rows for rows in range(1, args.per_device_train_batch_size + 1) if per_rank % rows == 0)
    return dataclasses.replace(fixed, per_device=per_device, accumulation=per_rank // per_device)


def resumed_batch(args: trl.SFTConfig, manifest: JsonObject) -> Batch | None:
    """The step of a run that its checkpoint was launched with on another number of ranks, divided over these; None if
    it has as many rows here, or if the arguments meant another one there.

    Raises:
        UserError: it does not divide over this world size.
    """
    had = manifest.get("batch")
    if not isinstance(had, dict) or not all(type(had.get(name)) is int for name in ("global_batch_size", "world_size")):
        return None
    meant, ranks = rows_per_rank(args) * had["world_size"], distributed.ranks().world_size
    if had["world_size"] == ranks // context_parallel(args) or meant != had["global_batch_size"]:
        return None
    return batch(args, meant, ranks)


def with_batch(training: TrainingConfig, batch: Batch) -> TrainingConfig:
    """The settings of a run whose steps are these, if another number of rows was configured."""
    if training.global_batch_size == batch.global_batch_size:
        return training
    return dataclasses.replace(
        training,
        global_batch_size=batch.global_batch_size,
        per_device_train_batch_size=batch.per_device,
        gradient_accumulation_steps=batch.accumulation,
    )


def recomputation(args: trl.SFTConfig, model: Model, *, tiled_mlp: bool = False) -> Recomputation:
    """Which activations are computed again: as the script sets it, or as it has loaded the model."""
    given: Any = args.gradient_checkpointing_kwargs or {}
    options = {name: value for name, value in given.items() if name not in (OFFLOAD, SELECTIVE)}
    loaded = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    kind: str | bool = args.gradient_checkpointing or loaded
    kind = kind if isinstance(kind, str) else bool(kind)
    if kind is True and (args.activation_offloading or given.get(OFFLOAD)):
        kind = OFFLOAD
    elif kind is True and given.get(SELECTIVE):
        kind = SELECTIVE
    elif kind is True:
        kind = getattr(model, "_unsloth_gradient_checkpointing", None) or True
    return Recomputation(kind=kind, tiled_mlp=tiled_mlp, options=options)


def timeout(args: trl.SFTConfig) -> int:
    """Seconds that a collective waits for a stuck rank: `ddp_timeout`, or this project's default if the user has not
    changed transformers'."""
    return TrainingConfig().ddp_timeout if args.ddp_timeout == TRANSFORMERS_TIMEOUT else args.ddp_timeout


def skips_preparation(args: trl.SFTConfig) -> bool:
    """Whether the rows are tokenized already, by `dataset_kwargs`."""
    given = args.dataset_kwargs
    return isinstance(given, dict) and bool(given.get("skip_prepare_dataset"))


def data_config(args: trl.SFTConfig) -> DataConfig:
    """How rows are read: TRL's defaults, not those of a YAML file."""
    prepared = skips_preparation(args)
    cut = {"keep_start": "truncate", "keep_end": "keep_end"}[args.truncation_mode]
    strategy = args.packing_strategy if args.packing else None
    packs = strategy is not None and strategy != "wrapped"
    return DataConfig(
        max_length=None if prepared or strategy == "wrapped" else args.max_length,
        over_length="split" if strategy == "bfd_split" else cut,  # type: ignore[arg-type]
        assistant_only_loss=args.assistant_only_loss,
        completion_only_loss=args.completion_only_loss,
        packing=packs,
        pack_length=args.max_length if packs else None,
        num_proc=args.dataset_num_proc,
        keep_empty=True,
    )


def configuration(args: trl.SFTConfig, stack: Stack, model: Model, batch: Batch, *, size_is_open: bool) -> Config:
    """The run as a configuration.

    Args:
        args: the user's SFTConfig.
        model: with its adapter, if it has one.
        size_is_open: as `leaves_micro_batch_open` returns it.
    """
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    adapters = getattr(model, "peft_config", None)
    training = TrainingConfig(
        output_dir=str(args.output_dir),
        global_batch_size=batch.global_batch_size,
        per_device_train_batch_size=None if size_is_open else batch.per_device,
        gradient_accumulation_steps=None if size_is_open else batch.accumulation,
        per_device_eval_batch_size=args.per_device_eval_batch_size,
        num_train_epochs=float(args.num_train_epochs),
        max_steps=args.max_steps,
        learning_rate=args.learning_rate,
        lr_scheduler_type=str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        warmup_steps=args.warmup_steps,
        weight_decay=args.weight_decay,
        optim=str(getattr(args.optim, "value", args.optim)),
        max_grad_norm=args.max_grad_norm,
        master_weights=weights_as_loaded(model).kind,  # type: ignore[arg-type]
        seed=args.seed,
        train_sampling_strategy=str(args.train_sampling_strategy),  # type: ignore[arg-type]
        gradient_checkpointing=recomputation(args, model).kind,  # type: ignore[arg-type]
        save_steps=_interval(args, "save"),
        save_total_limit=args.save_total_limit,
        eval_steps=_interval(args, "eval"),
        ddp_timeout=timeout(args),
        context_parallel=context_parallel(args),
        extra=_other_arguments(args),
    )
    sections = {
        "model": ModelConfig(
            model_name_or_path=name,
            backend=stack.backend,  # type: ignore[arg-type]
            dtype=_dtype(args, model),
            load_in_4bit=bool(getattr(model, "is_loaded_in_4bit", False)),
            load_in_8bit=bool(getattr(model, "is_loaded_in_8bit", False)),
            full_finetuning=not adapters,
            trust_remote_code=args.trust_remote_code,
        ),
        "lora": adapter(next(iter(adapters.values()))) if adapters else LoraConfig(),
        "data": data_config(args),
        "training": training,
        "logging": LoggingConfig(logging_steps=max(int(args.logging_steps), 1), generate_samples=0),
    }
    given = frozenset(
        f"{section}.{one.name}"
        for section, value in sections.items()
        for one in dataclasses.fields(SECTIONS[section])
        if one.default is not dataclasses.MISSING and getattr(value, one.name) != one.default
    )
    return Config(**sections, given=given)


def weights_as_loaded(model: Model) -> WeightPrecision:
    """How the script keeps its trained weights: as it has loaded the model."""
    return WeightPrecision(
        kind=NONE if count_rounded(model.parameters()) else FLOAT32, reason="as the script loads the model"
    )


def _dtype(args: trl.SFTConfig, model: Model) -> Any:
    """What the matrix products are computed in."""
    if args.bf16:
        return "bfloat16"
    if args.fp16:
        return "float16"
    stored = next((one.dtype for one in model.parameters() if one.is_floating_point()), "auto")
    return str(stored).removeprefix("torch.")


def _interval(args: trl.SFTConfig, what: str) -> int:
    """Steps between saves or evaluations; 0 if there are none. Once per epoch counts as the default interval."""
    strategy = getattr(args, f"{what}_strategy")
    if getattr(strategy, "value", strategy) == "no":
        return 0
    steps = getattr(args, f"{what}_steps") or 0
    return max(int(steps), 1)


def adapter(given: Any) -> LoraConfig:
    """The settings of an adapter of PEFT's. One of another kind than LoRA is recorded whole in `adapter_kwargs`."""
    if getattr(given.peft_type, "value", "") != "LORA":
        return LoraConfig(adapter_kwargs=files.to_json_types(given.to_dict()))
    targets = given.target_modules
    return LoraConfig(
        r=given.r,
        lora_alpha=given.lora_alpha,
        lora_dropout=given.lora_dropout,
        target_modules=sorted(targets) if isinstance(targets, set | list | tuple) else targets,
        target_parameters=sorted(given.target_parameters) if given.target_parameters else None,
        modules_to_save=list(given.modules_to_save) if given.modules_to_save else None,
        use_rslora=given.use_rslora,
        bias=given.bias,
    )


def _other_arguments(args: trl.SFTConfig) -> JsonObject:
    """The other fields of SFTConfig that the user has changed: those that a configuration accepts by their names."""
    ours = {one.name for kind in SECTIONS.values() for one in dataclasses.fields(kind)}
    found = {}
    for one in dataclasses.fields(args):
        default = one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default
        value = getattr(args, one.name)
        skipped = one.name in ours or one.name in REFUSED or one.name in TAKEN or one.name in _OF_THIS_LAUNCH
        if not skipped and value != default and isinstance(value, bool | int | float | str | list | dict | None):
            found[one.name] = value
    return files.to_json_types(found)
