"""TRL's training arguments, for both front doors."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import torch
import transformers
import trl

from finetune.config import Batch, Config
from finetune.config.arguments import FIXED
from finetune.config.rules import FOLLOWS_LOSS
from finetune.engine.model.load_arguments import resolve_dtype
from finetune.engine.optimizer import master_weights
from finetune.engine.training.schedule import explain_schedule_error
from finetune.errors import UserError
from finetune.runtime.bootstrap import Stack
from finetune.runtime.ranks import distributed
from finetune.runtime.types import JsonObject

# Settings that SFTConfig has by the same name.
_SAME = (
    *("output_dir", "per_device_eval_batch_size", "num_train_epochs", "max_steps", "learning_rate", "optim", "seed"),
    *("lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "ddp_timeout"),
)
NEVER = 2**40  # steps between checkpoints, for a run that saves only its best and last one


def training_arguments(given: trl.SFTConfig, batch: Batch, timeout: int) -> trl.SFTConfig:
    """A copy of SFTConfig as the engine needs it, for both front doors: what it handles itself is off.

    Args:
        timeout: seconds that a collective waits for a stuck rank.
    """
    args = copy.copy(given)
    for name, value in FIXED.items():
        setattr(args, name, value)
    args.per_device_train_batch_size = batch.per_device
    args.gradient_accumulation_steps = batch.accumulation
    args.chat_template_path = None  # the tokenizer has it by now
    # TensorBoard's files are written by the run's own logger, and rank 0 alone reports.
    args.report_to = [name for name in args.report_to or [] if name != "tensorboard" and distributed.ranks().is_main]
    # A dense model uses every trainable weight in every step. The search for unused ones walks the autograd graph once
    # per step, and fails with "marked as ready twice" under reentrant checkpointing.
    args.ddp_find_unused_parameters = bool(args.ddp_find_unused_parameters)
    args.ddp_broadcast_buffers = bool(args.ddp_broadcast_buffers)  # rotary tables: constant, equal on all ranks
    args.ddp_timeout = timeout
    args._n_gpu = min(args.n_gpu, 1)  # one process, one GPU: never torch's DataParallel
    for name in ("gradient_checkpointing", "activation_checkpointing"):  # `recompute.apply` turns it on
        if hasattr(args, name):
            setattr(args, name, False)
    args.gradient_checkpointing_kwargs = None
    return args


def configured_arguments(config: Config, stack: Stack, batch: Batch, *, evaluate: bool) -> trl.SFTConfig:
    """The training arguments of a resolved configuration."""
    training = config.training
    dtype = resolve_dtype(config, stack)
    tracks_best = evaluate and bool(training.eval_steps) and training.best_metric is not None
    settings: JsonObject = {name: getattr(training, name) for name in _SAME}
    settings |= dict(
        bf16=dtype == torch.bfloat16 and (stack.device == "cuda" or training.master_weights == master_weights.FLOAT32),
        fp16=stack.device == "cuda" and dtype == torch.float16,
        use_cpu=stack.device == "cpu",
        save_strategy="steps" if training.save_steps or tracks_best else "no",
        save_steps=training.save_steps or NEVER,
        eval_strategy="steps" if evaluate and training.eval_steps else "no",
        eval_steps=training.eval_steps or None,
        logging_steps=config.logging.logging_steps,
    )
    if config.logging.trackers:
        settings["run_name"] = Path(training.output_dir).resolve().name
    settings |= {key: value for key, value in training.extra.items() if key != "gradient_checkpointing_kwargs"}
    settings["report_to"] = "none"
    args = training_arguments(trl.SFTConfig(**settings), batch, training.ddp_timeout)
    if tracks_best:  # SFTConfig's constructor would require save_steps to be a multiple of eval_steps
        args.metric_for_best_model = training.best_metric
        args.greater_is_better = training.best_is_greatest
        args.load_best_model_at_end = training.load_best_model_at_end
    return args


_NEEDS_MODEL = ("galore_", "apollo_", "lomo", "adalomo")  # optimizers that are made for the model's own weights


def check_arguments(config: Config, stack: Stack, batch: Batch) -> None:
    """Check the values that only TRL and transformers judge, before a model is loaded.

    Raises:
        UserError: one of them is refused.
    """
    training = config.training
    try:
        args = configured_arguments(config, stack, batch, evaluate=bool(training.eval_steps))
        if args.torch_compile:
            check_compiler(args)
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=args.learning_rate)
        if not training.optim.startswith(_NEEDS_MODEL):
            kind, settings = trl.SFTTrainer.get_optimizer_cls_and_kwargs(args)
            kind([parameter], **settings)
        with explain_schedule_error(training.lr_scheduler_type, training.extra.get("lr_scheduler_kwargs")):
            schedule = transformers.get_scheduler(
                args.lr_scheduler_type,
                optimizer=optimizer,
                num_warmup_steps=args.get_warmup_steps(10),
                num_training_steps=10,
                scheduler_specific_kwargs=args.lr_scheduler_kwargs,  # type: ignore[arg-type]  # SFTConfig has parsed it
            )
            for factor in getattr(schedule, "lr_lambdas", ()):
                [factor(step) for step in range(11)]  # the last one is read after the last step
            if training.lr_scheduler_type in FOLLOWS_LOSS:
                [schedule.step(1.0) for _ in range(3)]  # type: ignore[call-arg]
    except UserError:
        raise
    except Exception as error:  # whatever a library raises for a value that it cannot use
        message = " ".join(str(error).split()) or type(error).__name__
        given = [*training.extra, "optim", "lr_scheduler_type"]
        named = [f"training.{key}" for key in given if re.search(rf"\b{re.escape(key)}\b", message)]
        keys = named or [f"training.{key}" for key in [*training.extra] or ["optim"]]
        raise UserError(
            f"{', '.join(keys)}: the libraries cannot use the value: {message[:300].rstrip('.')}. Change or remove it."
        ) from error


def check_compiler(args: trl.SFTConfig) -> None:
    """Raise a UserError if torch.compile has no such backend or mode."""
    from accelerate.utils import DynamoBackend
    from torch._inductor import list_mode_options

    backends, modes = [one.value.lower() for one in DynamoBackend], list(list_mode_options())
    for key, known in (("torch_compile_backend", backends), ("torch_compile_mode", modes)):
        value = getattr(args, key)
        if value is not None and str(value).lower() not in known:
            raise UserError(f"training.{key} is unknown: {value!r}. Set it to one of {', '.join(known)}.")
