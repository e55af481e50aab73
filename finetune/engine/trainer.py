"""Subclass of TRL's SFTTrainer: data order from the plan, a loss that is exact at any world size, atomic checkpoints.

Import it after `bootstrap.start`: on the unsloth backend, `trl.SFTTrainer` is then Unsloth's rewritten class.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from torch.utils.data import DataLoader
from transformers.trainer_callback import ExportableState

from finetune.config import Batch, Config, scaled_learning_rate
from finetune.config.arguments import FIXED
from finetune.config.rules import FOLLOWS_LOSS
from finetune.data import IGNORE_INDEX, ORDER
from finetune.data.collate import collate
from finetune.data.layout import Layout
from finetune.data.plan import Plan, RankView
from finetune.engine.checkpoint import best, checkpoints, tensor_files, tokenizer_files
from finetune.engine.kernels import attention
from finetune.engine.model import generation_config, router_loss
from finetune.engine.model.loading import keep_4bit_layout, resolve_dtype
from finetune.engine.monitoring import invariants, token_statistics
from finetune.engine.optimizer import eight_bit, master_weights
from finetune.engine.sharding import checkpoint_weights, shard
from finetune.errors import RunError, UserError
from finetune.runtime import files
from finetune.runtime.bootstrap import Stack
from finetune.runtime.machine import flash
from finetune.runtime.ranks import activity, distributed, interrupt, launcher

# Of an optimizer's group of parameters: what is no setting. All but the first are of the schedule-free ones.
_STATE_IN_GROUPS = frozenset(("params", "k", "train_mode", "weight_sum", "lr_max", "scheduled_lr"))
NEVER = 2**40  # steps between checkpoints, for a run that saves only its best and last one


def arguments(config: Config, stack: Stack, batch: Batch, *, evaluate: bool) -> trl.SFTConfig:
    """TRL's training arguments for a resolved configuration."""
    training = config.training
    dtype = resolve_dtype(config, stack)
    checkpointing = bool(training.gradient_checkpointing)
    tracks_best = evaluate and bool(training.eval_steps) and training.best_metric is not None
    settings: dict[str, Any] = dict(
        output_dir=training.output_dir,
        per_device_train_batch_size=batch.per_device,
        per_device_eval_batch_size=training.per_device_eval_batch_size,
        gradient_accumulation_steps=batch.accumulation,
        num_train_epochs=training.num_train_epochs,
        max_steps=training.max_steps,
        learning_rate=scaled_learning_rate(training, batch.global_batch_size),
        lr_scheduler_type=training.lr_scheduler_type,
        warmup_steps=training.warmup_steps,
        weight_decay=training.weight_decay,
        optim=training.optim,
        max_grad_norm=training.max_grad_norm,
        seed=training.seed,
        bf16=dtype == torch.bfloat16 and (stack.device == "cuda" or training.master_weights == master_weights.FLOAT32),
        fp16=stack.device == "cuda" and dtype == torch.float16,
        use_cpu=stack.device == "cpu",
        gradient_checkpointing=checkpointing,
        save_strategy="steps" if training.save_steps or tracks_best else "no",
        save_steps=training.save_steps or NEVER,
        eval_strategy="steps" if evaluate and training.eval_steps else "no",
        eval_steps=training.eval_steps or None,
        logging_steps=config.logging.logging_steps,
        ddp_timeout=training.ddp_timeout,
        # A dense model uses every trainable weight in every step. The search for unused ones walks the autograd graph
        # once per step, and fails with "marked as ready twice" under reentrant checkpointing.
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,  # the buffers are rotary tables: constant, equal on all ranks
    )
    if config.logging.trackers:
        settings["run_name"] = Path(training.output_dir).resolve().name
    settings |= training.extra
    if checkpointing:  # the reentrant kind, torch's default, fails under DDP
        further = training.extra.get("gradient_checkpointing_kwargs") or {}
        settings["gradient_checkpointing_kwargs"] = {"use_reentrant": False} | further
    settings |= FIXED | {"report_to": "none"}
    args = trl.SFTConfig(**_with_current_field_names(settings))
    if tracks_best:
        best.set_arguments(args, training)
    return args


_NEEDS_MODEL = ("galore_", "apollo_", "lomo", "adalomo")  # optimizers that are made for the model's own weights


def check_arguments(config: Config, stack: Stack, batch: Batch) -> None:
    """Check the values that only TRL and transformers judge, before a model is loaded.

    Raises:
        UserError: one of them is refused.
    """
    training = config.training
    try:
        args = arguments(config, stack, batch, evaluate=bool(training.eval_steps))
        if args.torch_compile:
            _check_compiler(args)
        if args.activation_offloading and stack.device == "cpu":
            raise UserError(
                "training.activation_offloading moves activations off the GPU, and there is none. Remove it."
            )
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=args.learning_rate)
        if not training.optim.startswith(_NEEDS_MODEL):
            kind, settings = trl.SFTTrainer.get_optimizer_cls_and_kwargs(args)
            kind([parameter], **settings)
        with refused_schedule(training.lr_scheduler_type, training.extra.get("lr_scheduler_kwargs")):
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


def _check_compiler(args: Any) -> None:
    """Raise a UserError if torch.compile has no such backend or mode."""
    from accelerate.utils import DynamoBackend
    from torch._inductor import list_mode_options

    backends, modes = [one.value.lower() for one in DynamoBackend], list(list_mode_options())
    for key, known in (("torch_compile_backend", backends), ("torch_compile_mode", modes)):
        value = getattr(args, key)
        if value is not None and str(value).lower() not in known:
            raise UserError(f"training.{key} is unknown: {value!r}. Set it to one of {', '.join(known)}.")


@contextlib.contextmanager
def refused_schedule(name: Any, arguments: Any) -> Iterator[None]:
    """Context in which a schedule is made; an error is about its arguments.

    Raises:
        UserError: with the keys.
    """
    try:
        yield
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        message = " ".join(str(error).split())
        given = f"training.lr_scheduler_kwargs is {arguments}, and " if arguments else ""
        raise UserError(
            f"{given}training.lr_scheduler_type {getattr(name, 'value', name)} cannot be used so: {message[:300]}. "
            "Give the arguments that transformers' schedule of this name has, or choose another."
        ) from error


def _with_current_field_names(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with `gradient_checkpointing*` renamed to `activation_checkpointing*` if the installed SFTConfig has
    these fields, as it does from transformers 5.18 on."""
    present = {field.name for field in dataclasses.fields(trl.SFTConfig)}
    settings = dict(settings)
    for kind in ("checkpointing", "checkpointing_kwargs"):
        if f"activation_{kind}" in present and f"gradient_{kind}" in settings:
            settings.setdefault(f"activation_{kind}", settings.pop(f"gradient_{kind}"))
    return settings


class SFTTrainer(trl.SFTTrainer):
    """TRL's trainer with this project's data order, loss, evaluation and checkpoints.

    Loss of a step = sum of the token losses of the global batch / number of its supervised tokens, at any world size
    and accumulation. Each rank multiplies its share by the world size, because DDP averages over ranks. The gradient of
    a mixture of experts also has that of the load-balancing loss, which is not in the loss (`load_balancing`).
    """

    # transformers types these as optional; here they are always set.
    model: Any
    args: Any
    state: Any
    optimizer: Any
    lr_scheduler: Any
    processing_class: Any

    loss_is_scaled_for_ga: bool | None = None  # read by transformers 5.19 and newer

    def __init__(
        self,
        *,
        model: Any,
        args: trl.SFTConfig,
        tokenizer: Any,
        stack: Stack,
        plan: Plan,
        layout: Layout,
        eval_layout: Layout | Mapping[str, Layout] | None = None,
        callbacks: list[transformers.TrainerCallback] | None = None,
        reduces_once: bool | None = None,
        weights: str = master_weights.FLOAT32,
        saved_dtype: torch.dtype | None = None,
        **further: Any,
    ) -> None:
        """
        Args:
            args: as `managed` returns them.
            reduces_once: of a model that must be sharded: whether accumulated gradients are reduced in a step's last
                pass only. None for other runs.
            eval_layout: the held-out rows, or several sets of them by name.
            weights: how the trained weights are kept, as `master_weights.Choice.kind`.
            saved_dtype: of the weights in a saved model; None saves them as they are. Checkpoints keep what they are.
            further: arguments of TRL's constructor that concern neither data nor loss, such as `peft_config`.
        """
        self.stack = stack
        self.plan = plan
        self.layout = layout
        self.eval_layout = eval_layout
        self.resumed_step = 0  # optimizer step at which a resumed run starts
        self.retention = checkpoints.Retention()
        self.manifest: dict[str, Any] = {}  # fields of each checkpoint's manifest beside step, plan and files
        self._rebuilds = False
        self.before_first_step: Callable[[], None] | None = None  # called once, before the model is wrapped
        self.sharded = shard.is_sharded(model)
        if stack.device == "cpu":
            keep_4bit_layout(model)
        self.reduces_once = reduces_once
        self.weights = weights
        self.saved_dtype = saved_dtype
        self._in_checkpoint = False
        self.load_balancing: router_loss.LoadBalancing | None = None
        self._uneven = stack.backend == "unsloth" and flash.is_enabled()
        self._packed_kernel = model.config.get_text_config()._attn_implementation == attention.PACKED
        router_loss.check(model, args.router_aux_loss_coef)
        super().__init__(
            model=model,
            args=args,
            train_dataset=layout.rows.dataset,
            eval_dataset=datasets_of(eval_layout),
            processing_class=tokenizer,
            data_collator=self._collate,
            callbacks=callbacks,
            **further,
        )
        if self.aux_loss_enabled:  # by TRL's rules
            self.load_balancing = router_loss.install(self.model, self.router_aux_loss_coef)
            self.aux_loss_enabled = False  # TRL's own loss has nothing to add
        if hasattr(transformers.Trainer, "loss_is_scaled_for_ga"):  # else `training_step` goes by the model alone
            self.loss_is_scaled_for_ga = True
        self.remove_callback(transformers.PrinterCallback)
        if self.sharded:  # accelerate would wrap it in DDP: only casts remain for it to do
            self.accelerator.prepare_model = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)
        if self.accelerator.ddp_handler is not None and getattr(self.model, "peft_config", None) is None:
            # Full fine-tuning: the gradients are views of DDP's buckets, not a second copy (D9).
            self.accelerator.ddp_handler.gradient_as_bucket_view = True
        self.model.register_forward_pre_hook(_unwrap_host_tensors, with_kwargs=True)
        self.step_losses: list[torch.Tensor] = []  # this rank's share of each step's loss, until it is drained
        self._step_loss: torch.Tensor | None = None
        self._step_tokens: int | None = None  # of all ranks' documents in the step that is trained
        self._balancing: torch.Tensor | None = None  # load-balancing loss, summed like this:
        self._top1_and_entropy: torch.Tensor | None = None  # summed since the last record, on the device
        self.eval_document_losses: list[float] = []  # of the last evaluation, all ranks
        self._eval_tokens: token_statistics.TokenStatistics | None = None  # of the last micro-batch
        # Unsloth's version of TRL's class may leave it out, for a transformers model in a program that imports Unsloth.
        self._has_fused_head = "unsloth" not in sys.modules or has_fused_head(self.model)
        self._counts_checked = False
        self._gradients_in_buckets = self._first_buckets_freed = False

    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> tuple[Any, Any]:
        """As in transformers, whose optimizers partly live in other packages; or one that rounds stochastically.

        Raises:
            UserError: the optimizer's package or one of its required arguments is missing.
        """
        try:
            kind, settings = trl.SFTTrainer.get_optimizer_cls_and_kwargs(args, model)
        except (ImportError, ValueError) as error:
            name = getattr(args.optim, "value", args.optim)
            raise UserError(f"training.optim: {name} cannot be used here: {error}") from error
        if 0 < settings.get("warmup_steps", 0) < 1:  # schedule-free ones warm up themselves, and count steps
            settings["warmup_steps"] = self.args.get_warmup_steps(self.total_steps)
        if self.weights != master_weights.STOCHASTIC:
            return kind, settings
        return master_weights.rounding_optimizer(kind, settings)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As in transformers."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.weights == master_weights.STOCHASTIC:
            master_weights.seed_rounding(optimizer, self.args.seed, lambda: self.state.global_step)
        return optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers.

        Raises:
            UserError: `lr_scheduler_kwargs` do not fit the schedule.
        """
        with refused_schedule(self.args.lr_scheduler_type, self.args.lr_scheduler_kwargs):
            return super().create_scheduler(*args, **kwargs)

    def use_evaluation_weights(self) -> None:
        """Put the weights that the optimizer promises into the model: a schedule-free one trains at another point, to
        which `training_step` returns. Others have one set of weights."""
        if callable(switch := getattr(self.optimizer, "eval", None)):
            switch()

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """As in transformers; the parts of a sharded model are in place."""
        if not self.sharded:
            super()._move_model_to_device(model, device)

    # --- data -------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        """Loader of this rank's rows. Bypasses accelerate's `prepare`, which would shard them again."""
        if (prepare := self.before_first_step) is not None:
            self.before_first_step = None
            prepare()
        epoch, step = divmod(self.resumed_step, self.plan.steps_per_epoch)
        view = RankView(
            plan=self.plan,
            rank=self.args.process_index,
            world_size=self.args.world_size,
            per_device=self.args.per_device_train_batch_size,
            accumulation=self.args.gradient_accumulation_steps,
            epoch=epoch,
            start=step * self.args.gradient_accumulation_steps,
        )
        return _PlanLoader(
            self.layout,  # type: ignore[arg-type]  # duck-typed map-style dataset
            batch_sampler=view,
            collate_fn=functools.partial(self._collate, pack_length=self.layout.packs.pack_length),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.stack.device == "cuda",
            # Without its own generator the loader draws a seed from the global one, which would change the dropout
            # masks of a resumed run.
            generator=torch.Generator().manual_seed(self.args.seed),
        )

    def _collate(self, rows: Any, pack_length: int | None = None) -> dict[str, Any]:
        pad = self.processing_class.pad_token_id or 0  # masked, so any token will do
        batch = collate(rows, pad_token_id=pad, pack_length=pack_length, uneven=self._uneven)
        if self.load_balancing is None:
            batch.pop("document_lengths")
        if self.stack.backend == "transformers" and not self._packed_kernel:  # it reads boundaries from position_ids
            batch.pop("packed_seq_lengths", None)
        return batch

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Move a micro-batch to the device without blocking, except for the document lengths.

        Transformers' layers get the boundaries of the documents on the device. Unsloth reads the lengths on the host:
        on the device they would cost a host-device sync. `_HostTensor` keeps DDP from moving them. Non-blocking copies
        let the host launch the forward pass while the device still works on the previous micro-batch; transformers'
        method blocks on each tensor.
        """
        lengths = inputs.pop("packed_seq_lengths", None)
        moved = {name: value.to(self.args.device, non_blocking=True) for name, value in inputs.items()}
        if lengths is None:
            return moved
        if self._packed_kernel:
            return moved | attention.arguments(lengths, self.args.device)
        return moved | {"packed_seq_lengths": _HostTensor(lengths)}

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], torch.Tensor | None]:
        """The micro-batches of one optimizer step, and the number of supervised tokens in the global batch.

        The count (an int64 scalar on the device) comes from the plan, so it needs no collective and no host-device
        sync.
        """
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        if not batches:
            return batches, None
        epoch, step = divmod(self.state.global_step, self.plan.steps_per_epoch)
        planned = self.plan.label_tokens_of_step(epoch, step)
        self._step_tokens = int(self.layout.tokens[self.plan.step_rows(epoch, step)].sum())
        if not self._counts_checked:
            self._check_count(batches, planned)
        count = torch.tensor(planned, dtype=torch.int64)
        if self.stack.device == "cuda":
            count = count.pin_memory().to(device, non_blocking=True)
        return batches, count

    def _check_count(self, batches: list[dict[str, Any]], planned: int) -> None:
        """Check, once per run, that the ranks' supervised tokens add up to the plan's count.

        Raises:
            RunError: they do not.
        """
        own = sum(int((batch["labels"][:, 1:] != IGNORE_INDEX).sum()) for batch in batches)
        held = int(distributed.sum_over_ranks([own])[0])
        if held != planned:
            raise RunError(
                f"The loss of step {self.state.global_step} would be scaled wrongly: the ranks hold {held} supervised "
                f"tokens, the plan expects {planned}. Delete the data cache and prepare the data again."
            )
        self._counts_checked = True

    def set_batch(self, batch: Batch) -> None:
        """Divide each step in another way, before the first."""
        self.args.per_device_train_batch_size = self._train_batch_size = batch.per_device
        self.args.gradient_accumulation_steps = batch.accumulation

    # --- loss -------------------------------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """This rank's share of the step's loss, times the world size; every argument is passed on.

        Args:
            num_items_in_batch: supervised tokens of the global batch. Without it the loss is the micro-batch's mean.
        """
        lengths = inputs.pop("document_lengths", None)
        if return_outputs or num_items_in_batch is None:
            return super().compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch, **kwargs
            )
        if self.load_balancing is None or not torch.is_grad_enabled():
            return self._token_loss(model, inputs, num_items_in_batch, **kwargs)
        tokens = inputs["input_ids"].numel()
        share = 1 / (self._step_tokens or tokens)  # a trial of a micro-batch has no step
        with self.load_balancing.forward(lengths, tokens, share, self._scale()):
            loss = self._token_loss(model, inputs, num_items_in_batch, **kwargs)
        loss, value = self.load_balancing.attach(loss)
        self._balancing = value if self._balancing is None else self._balancing + value
        return loss

    def _token_loss(self, model: Any, inputs: dict[str, Any], num_items_in_batch: torch.Tensor, **kwargs: Any) -> Any:
        """`compute_loss`, without the gradient of a term that is no sum over supervised tokens."""
        loss: Any
        if not self.model_accepts_loss_kwargs:
            loss = self._loss_of_model_that_ignores_counts(model, inputs, num_items_in_batch)
        elif self.stack.backend == "unsloth" and torch.is_grad_enabled():
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch, **kwargs)
        elif self.stack.backend == "transformers" and self.stack.device == "cuda" and self._has_fused_head:
            # TRL's fused head computes token losses without keeping the logits. TRL's own compute_loss around it syncs
            # with the GPU several times per step, to average metrics.
            outputs = model(**inputs, use_cache=False, fused_lm_head=True)
            self._note_tokens(outputs, inputs)
            loss = -outputs.log_probs.sum() / num_items_in_batch * self._scale()
        else:
            # TRL's fused head needs Triton and a GPU; transformers' loss does not.
            loss, outputs = transformers.Trainer.compute_loss(
                self, model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch, **kwargs
            )
            self._note_tokens(outputs, inputs)
        # DDP and accelerate modify the loss in place, which fails on a view from a fused kernel (unsloth issue 3452).
        return loss.clone() if loss._is_view() else loss

    def _note_tokens(self, outputs: Any, inputs: dict[str, Any]) -> None:
        """Keep what this forward pass yields beside the loss: in evaluation whatever it has; in training only what the
        fused head has computed anyway."""
        if torch.is_grad_enabled():
            entropy, is_top1 = getattr(outputs, "entropy", None), getattr(outputs, "is_top1", None)
            if entropy is not None and is_top1 is not None:
                sums = torch.stack([is_top1.sum().float(), entropy.detach().sum().float()])
                self._top1_and_entropy = sums if self._top1_and_entropy is None else self._top1_and_entropy + sums
        else:
            self._eval_tokens = token_statistics.of_outputs(outputs, inputs["labels"])

    def _loss_of_model_that_ignores_counts(
        self, model: Any, inputs: dict[str, Any], total: torch.Tensor
    ) -> torch.Tensor:
        """The same loss for a model whose forward ignores the count and returns the mean over its micro-batch."""
        own = (inputs["labels"][:, 1:] != IGNORE_INDEX).sum()
        outputs = model(**inputs)
        mean = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        mean = torch.where(own > 0, mean, torch.zeros_like(mean))  # the mean over no label is NaN
        return mean * own / total * self._scale()

    def _scale(self) -> int:
        """What this rank's share of a step's loss is multiplied by: DDP averages over ranks, and unless
        `loss_is_scaled_for_ga` is set, `training_step` divides by the accumulation for models that ignore counts."""
        divided = torch.is_grad_enabled() and not self.model_accepts_loss_kwargs and not self.loss_is_scaled_for_ga
        return self.args.world_size * (self.current_gradient_accumulation_steps if divided else 1)

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of one micro-batch; the loss stays on the device."""
        if self.sharded:
            shard.set_reduction(self.model, self.accelerator.sync_gradients or not self.reduces_once)
        self._keep_gradients_in_buckets(model)
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.load_balancing is not None:
            self.load_balancing.end()
        if self.sharded:
            invariants.check_loss(loss)
        self._free_first_buckets(model)
        self._step_loss = loss if self._step_loss is None else self._step_loss + loss
        if self.accelerator.sync_gradients:
            self.step_losses.append(self._step_loss)
            self._step_loss = None
        return loss

    def _keep_gradients_in_buckets(self, model: Any) -> None:
        """Once per run, under accumulation: make the gradients views of DDP's buckets (defects.md, D9).

        A micro-batch that does not reduce adds to an existing gradient; if there is none, it allocates one outside the
        buckets. So the run's first micro-batch reduces as well, which leaves views. That step's last micro-batch then
        averages the already averaged gradient again, which does not change it. From then on gradients are zeroed in
        place.
        """
        accumulates = not self.accelerator.sync_gradients and getattr(model, "gradient_as_bucket_view", False)
        if accumulates and not self._gradients_in_buckets:
            model.require_backward_grad_sync = True  # for this micro-batch only: `no_sync` resets it on exit
            model.zero_grad = functools.partial(model.zero_grad, set_to_none=False)
            self._gradients_in_buckets = True

    def _free_first_buckets(self, model: Any) -> None:
        """Once per run, after the first micro-batch that reduces: make NCCL release DDP's buckets (defects.md, D8).

        DDP replaces them before the next reduction. On a rank whose host runs ahead of its GPU, NCCL's process group
        would still hold the old ones, as much memory as all gradients. Costs one host-device sync.
        """
        if not self._first_buckets_freed and getattr(model, "require_backward_grad_sync", False):
            distributed.drain_nccl_work()
            self._first_buckets_freed = True

    def take_step_losses(self) -> list[float]:
        """This rank's share of the losses of the steps since the last call: their mean over ranks is the loss in nats
        per supervised token. Synchronizes with the device."""
        if not self.step_losses:
            return []
        own = torch.stack(self.step_losses).double().tolist()
        self.step_losses.clear()
        return own

    def take_token_statistics(self) -> tuple[float, float] | None:
        """(supervised tokens whose label was the likeliest, summed entropy in nats) of this rank since the last call;
        None if the loss does not yield them. Synchronizes with the device."""
        sums, self._top1_and_entropy = self._top1_and_entropy, None
        return None if sums is None else tuple(sums.tolist())

    def take_load_balancing(self) -> float | None:
        """This rank's share of the load-balancing losses of the steps since the last call, without the coefficient; the
        sum over ranks is that of the steps. None if there were none. Synchronizes with the device."""
        summed, self._balancing = self._balancing, None
        return None if summed is None else float(summed)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """0: callbacks count them from the plan when they log. transformers would walk all modules on every call."""
        return 0

    # --- evaluation -------------------------------------------------------------------------------------------------

    @interrupt.busy()
    @activity.during("evaluation")
    @torch.no_grad()
    def evaluate(
        self,
        eval_dataset: Layout | Mapping[str, Layout] | str | None = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Mean loss in nats per supervised token of the held-out rows, each row once.

        Independent of world size and evaluation batch size: sums are reduced over all ranks, then divided. Several
        named sets are evaluated one after another, with the metrics `eval_NAME_loss` and so on.

        Args:
            eval_dataset: other rows than the trainer's own, or the name of one of its sets.
        """
        layout = self.eval_layout if eval_dataset is None else eval_dataset
        if isinstance(layout, str) and isinstance(self.eval_layout, Mapping):
            layout = self.eval_layout[layout]
        if isinstance(layout, Mapping):
            found: dict[str, float] = {}
            for name, one in layout.items():
                found |= self.evaluate(one, ignore_keys, f"{metric_key_prefix}_{name}")
            return found
        if layout is None or isinstance(layout, str):
            raise ValueError("evaluate needs held-out rows: set data.eval_file or data.eval_fraction")
        metrics = self.evaluate_layout(layout, metric_key_prefix)
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def evaluate_layout(self, layout: Layout, prefix: str) -> dict[str, float]:
        """Loss and, if the model yields them, token accuracy and entropy over all rows of `layout`."""
        was_training = self.model.training
        self.model.eval()
        self.use_evaluation_weights()
        total = 0.0
        one = torch.ones((), dtype=torch.int64, device=self.args.device)  # dividing by 1 gives sums
        size = self.args.per_device_eval_batch_size
        order = layout.largest_first()[self.args.process_index :: self.args.world_size]
        losses, documents, tokens = [], [], []
        for start in range(0, len(order), size):
            activity.enter("evaluation")  # anew: a long evaluation is not a long phase as long as it gets on
            rows = layout.__getitems__(order[start : start + size].tolist())
            batch = self._collate(rows, pack_length=layout.packs.pack_length)
            inputs, self._eval_tokens = self._prepare_inputs(batch), None
            with self.compute_loss_context_manager(), self.accelerator.autocast():
                loss = self.compute_loss(self.model, inputs, num_items_in_batch=one)
            losses.append(loss.double() / self.args.world_size)
            if self._eval_tokens is not None:
                documents.append(token_statistics.document_losses(self._eval_tokens, inputs))
                tokens.append(torch.stack([self._eval_tokens.is_top1.sum(), self._eval_tokens.entropy.sum()]).double())
                self._eval_tokens = None
        if self.sharded:
            self._pass_with_other_ranks(layout, len(losses), one)
        if losses:
            total = float(torch.stack(losses).sum())
        known = len(tokens) == len(losses)  # of all micro-batches, or the means would be of some
        top1, entropy = torch.stack(tokens).sum(0).tolist() if known and tokens else (0.0, 0.0)
        summed, labels, top1, entropy, unknown = distributed.sum_over_ranks(
            [total, float(layout.label_tokens[order].sum()), top1, entropy, float(not known)]
        )
        self.model.train(was_training)
        metrics = {f"{prefix}_loss": summed / labels}
        self.eval_document_losses = []
        if not unknown:
            metrics |= {f"{prefix}_token_accuracy": top1 / labels, f"{prefix}_entropy": entropy / labels}
            own = torch.cat(documents).tolist() if documents else []
            self.eval_document_losses = [loss for part in distributed.gather_objects(own) for loss in part]
        return metrics

    def _pass_with_other_ranks(self, layout: Layout, done: int, count: torch.Tensor) -> None:
        """Forward passes on the first row, without a result, until this rank has made as many as every other: each pass
        gathers the parameters of a sharded model from all ranks."""
        most = math.ceil(math.ceil(len(layout) / self.args.world_size) / self.args.per_device_eval_batch_size)
        if done < most:
            batch = self._collate(layout.__getitems__([0]), pack_length=layout.packs.pack_length)
            inputs = self._prepare_inputs(batch)
            for _ in range(most - done):
                with self.compute_loss_context_manager(), self.accelerator.autocast():
                    self.compute_loss(self.model, inputs, num_items_in_batch=count)
            self._eval_tokens = None
        shard.reshard(self.model)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in transformers. Every rank calls it if the model is sharded."""
        self.use_evaluation_weights()
        if not self.sharded:
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(output_dir or self.args.output_dir)
        with generation_config.not_saved(self.model):
            checkpoint_weights.save_model(self.model, folder, self.saved_dtype, self._in_checkpoint)
        if self.args.should_save:
            self._save_beside_weights(folder)
        distributed.barrier()

    def _save_beside_weights(self, folder: Path) -> None:
        """Generation config and tokenizer. Beside an adapter, the former has the end tokens that export and chat add to
        the base's. PEFT's model card, which is empty and has the base model's path on this machine, is left out."""
        files.remove(folder / "README.md")  # the folder is new: nobody else has written there
        tokenizer = self.processing_class
        ends = [tokenizer.eos_token_id, *generation_config.trained_ends(tokenizer, self.layout.rows)]
        generation_config.write(folder, self.model, ends)
        tokenizer_files.save(tokenizer, folder)

    @contextlib.contextmanager
    def keeping_dtypes(self) -> Iterator[None]:
        """Context in which models are saved as they are trained, to be loaded again; not in `saved_dtype`."""
        self._in_checkpoint = True
        try:
            yield
        finally:
            self._in_checkpoint = False

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """As in transformers; of a sharded model each rank reads its part."""
        if self.sharded:
            checkpoint_weights.load_model(self.model, Path(resume_from_checkpoint))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As in transformers; of a sharded model whole tensors, written by all ranks."""
        if not self.sharded:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        tensor_files.write_optimizer(Path(output_dir), self.optimizer)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, "scheduler.pt"))

    @interrupt.busy()
    @activity.during("saving")
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write checkpoint-N under a temporary name; rename it once all ranks' files and the manifest are there."""
        output_dir = Path(self.args.output_dir)
        target = output_dir / f"checkpoint-{self.state.global_step}"
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(target)  # on every rank: all load it in the end
        with (
            checkpoints.no_space(output_dir, target.name),
            checkpoints.staging(target, main=self.args.should_save) as staging,
        ):
            distributed.barrier()
            with self.keeping_dtypes():
                self.save_model(str(staging), _internal_call=True)
            if not self.args.save_only_model:
                self._save_optimizer_and_scheduler(str(staging))
                self._save_scaler(str(staging))
                self._save_rng_state(str(staging))
                if not self.args.should_save:  # the main rank, perhaps on another machine, syncs the rest
                    files.sync_file(staging / f"rng_state_{self.args.process_index}.pth")
            if self.args.should_save:
                self._save_state(staging)
            distributed.barrier()
            if self.args.should_save:
                fields = {
                    "step": self.state.global_step,
                    "plan": self.plan.digest(),
                    "order": ORDER,
                    "batch": {
                        "per_device": self.args.per_device_train_batch_size,
                        "global_batch_size": self.plan.global_batch_size,
                        "world_size": self.args.world_size,
                    },
                    "launch": launcher.launch_id(),
                }
                checkpoints.seal(staging, fields | self.manifest)
        if self.args.should_save:
            kept = Path(self.state.best_model_checkpoint or target).name
            checkpoints.rotate(output_dir, self.retention, target.name, kept)
        distributed.barrier()

    def _save_state(self, staging: Path) -> None:
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                self.state.stateful_callbacks[type(callback).__name__] = callback.state()
        self.state.save_to_json(str(staging / "trainer_state.json"))

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Weights, configuration and tokenizer. Not the pickled arguments: run.json has them as text."""
        folder = str(output_dir or self.args.output_dir)
        unwrapped = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        dtype = self.saved_dtype
        if dtype is not None and not self._in_checkpoint:
            state_dict = master_weights.saved_state(unwrapped, dtype)
        with generation_config.not_saved(unwrapped):
            unwrapped.save_pretrained(folder, state_dict=state_dict, safe_serialization=True)
        if dtype is not None:  # also in a checkpoint: whoever loads it gets the model
            unwrapped.config.dtype = dtype
            unwrapped.config.save_pretrained(folder)
        self._save_beside_weights(Path(folder))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load both on the host; the optimizer moves its state to the devices of its parameters.

        transformers maps the file to the device of `args`, which fails for ranks on a CPU ("tagged with cpu:0").
        With `rebuild`, the optimizer's state and the schedule's position come from the checkpoint, everything else
        (learning rates, betas, weight decay, the schedule's shape) from this configuration.
        """
        if checkpoint is None:
            return
        folder, schedule = Path(checkpoint), read_state(Path(checkpoint, "scheduler.pt"))
        parameters = [one for group in self.optimizer.param_groups for one in group["params"]]
        in_codes = eight_bit.is_used(self.optimizer)
        if tensor_files.has_optimizer(folder):
            with loading(folder / "optimizer.json"):
                read = tensor_files.read_optimizer(folder, parameters, in_codes=in_codes)
                self._restore_optimizer_and_schedule(read, schedule)
            return
        optimizer = read_state(folder / "optimizer.pt", mapped=self.sharded)
        with loading(folder / "optimizer.pt"):
            if self.sharded:
                optimizer = tensor_files.split_optimizer(optimizer, parameters, in_codes=in_codes)
            self._restore_optimizer_and_schedule(optimizer, schedule)

    def _restore_optimizer_and_schedule(self, optimizer: dict[str, Any], schedule: dict[str, Any]) -> None:
        if not self._rebuilds:
            self.optimizer.load_state_dict(optimizer)
            self.lr_scheduler.load_state_dict(schedule)
            return
        fresh = [
            {name: value for name, value in group.items() if name not in _STATE_IN_GROUPS}
            for group in self.optimizer.param_groups
        ]
        self.optimizer.load_state_dict(optimizer)
        for group, values in zip(self.optimizer.param_groups, fresh, strict=True):
            group.update(values)
        move_schedule(self.lr_scheduler, int(schedule.get("last_epoch", self.resumed_step)))

    def _load_best_model(self) -> None:
        """Load the weights of the best evaluation, verified, on every rank."""
        self.use_evaluation_weights()
        checkpoint = Path(self.state.best_model_checkpoint)
        if checkpoint.name == f"checkpoint-{self.state.global_step}":
            return  # these are the weights in memory
        best.verify(checkpoint, Path(self.args.output_dir, f"checkpoint-{self.state.global_step}"))
        with loading(checkpoint):
            self._load_from_checkpoint(str(checkpoint))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        rng_file = f"rng_state_{self.args.process_index}.pth" if self.args.world_size > 1 else "rng_state.pth"
        with loading(Path(str(checkpoint), rng_file)):
            super()._load_rng_state(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        with loading(Path(str(checkpoint), "scaler.pt")):
            super()._load_scaler(checkpoint)

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, but the intervals for logging, saving and evaluation come from this configuration, not
        from the checkpoint's trainer_state.json."""
        trained = super()._init_training_state(max_steps, *args, **kwargs)
        self.state.compute_steps(self.args, max_steps)
        return trained

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        args = self.args
        return args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * self.plan.steps_per_epoch)

    def train(self, resume_from_checkpoint: str | None = None, *, rebuild: bool = False, **kwargs: Any) -> Any:
        """Train to the end, from the beginning or from a complete checkpoint.

        Args:
            rebuild: take the settings of optimizer and schedule from this run, not from the checkpoint.
        """
        self._rebuilds = rebuild
        if resume_from_checkpoint is None:
            self.resumed_step = 0
            return self._train_to_end(**kwargs)
        self.resumed_step = checkpoints.manifest(Path(resume_from_checkpoint))["step"]
        state = Path(resume_from_checkpoint, "trainer_state.json")
        with loading(state):
            reached = transformers.TrainerState.load_from_json(str(state))
        trackers = [one for one in self.callback_handler.callbacks if isinstance(one, best.BestModel)]
        ended = [one for one in trackers if one.ended_at(self.args, reached, self.total_steps)]
        for tracker in ended:
            tracker.stopped_at = self.resumed_step if self.resumed_step < self.total_steps else None
        if self.resumed_step < self.total_steps and not ended:
            return self._train_to_end(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        return self._train_zero_steps(resume_from_checkpoint)

    def _train_to_end(self, **kwargs: Any) -> Any:
        output = super().train(**kwargs)
        self.use_evaluation_weights()
        return output

    def _train_zero_steps(self, checkpoint: str) -> None:
        """Load the weights and the state of a checkpoint at the end of the run, then the best weights if asked for.
        transformers would train one more step before it checks for the end."""
        self._load_from_checkpoint(checkpoint)
        self.state = transformers.TrainerState.load_from_json(str(Path(checkpoint, "trainer_state.json")))
        self.state.max_steps = self.total_steps
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.state.is_local_process_zero = self.is_local_process_zero()
        if not Path(self.state.best_model_checkpoint or "").is_dir():
            self.state.best_model_checkpoint = None
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
            self._load_best_model()
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)


@contextlib.contextmanager
def loading(path: Path) -> Iterator[None]:
    """Turn an error while loading `path` into a RunError: the checksum of this file of a checkpoint is right, its
    content is not."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:  # the GPU is full; the file may be fine
        raise
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise RunError(
            f"{path} cannot be used: {lines[0][:200]}. Resume from another checkpoint, or start a new run."
        ) from error


def read_state(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """Load a file of tensors and plain values onto the host, without running any code in it.

    Args:
        mapped: map the file into memory, for a reader that needs only parts of it.

    Raises:
        RunError: it holds something else.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise RunError(
            f"{path} is not a file of tensors ({str(error).splitlines()[0][:200]}). Resume from another checkpoint."
        ) from error


def move_schedule(schedule: Any, step: int) -> None:
    """Move a new schedule to optimizer step `step` and set its optimizer's learning rates to match.

    Schedules that depend on measurements (reduce_lr_on_plateau, greedy) have no position; they start over.
    """
    if not isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):
        return
    schedule.last_epoch = step
    schedule._step_count = step + 1
    schedule._last_lr = [
        base * factor(step) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for group, rate in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
        set_learning_rate(group, rate)


def set_learning_rate(group: dict[str, Any], rate: float | torch.Tensor) -> None:
    """Of a group of an optimizer's parameters. torchao's optimizers have it in a tensor, and refuse a number there."""
    if torch.is_tensor(group["lr"]):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def datasets_of(layout: Layout | Mapping[str, Layout] | None) -> Any:
    """What TRL's constructor gets as its evaluation rows; it only looks whether there are any, and at their names."""
    if layout is None or isinstance(layout, Layout):
        return layout.rows.dataset if layout else None
    return {name: one.rows.dataset for name, one in layout.items()}


def has_fused_head(model: Any) -> bool:
    """Whether TRL has given the model the forward that computes token losses without keeping the logits."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    code = getattr(base.forward, "__code__", None)
    return code is not None and "fused_lm_head" in code.co_varnames


class _HostTensor:
    """Wraps a tensor among a forward's arguments to keep it on the host: DDP moves every tensor it recognizes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _unwrap_host_tensors(model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of the model inside DDP: unwraps the tensors."""
    return args, {name: value.tensor if isinstance(value, _HostTensor) else value for name, value in kwargs.items()}


class _PlanLoader(DataLoader):
    """A DataLoader that passes the epoch to its rank view; plain DataLoaders have no `set_epoch`."""

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
