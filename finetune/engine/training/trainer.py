"""Subclass of TRL's SFTTrainer: data order from the plan, a loss that is exact at any world size, atomic checkpoints.

Import it after `bootstrap.start`: on the unsloth backend, `trl.SFTTrainer` is then Unsloth's rewritten class.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from torch.utils.data import DataLoader
from transformers import TrainingArguments
from transformers.trainer_callback import ExportableState

from finetune.config import Batch
from finetune.data import IGNORE_INDEX
from finetune.data.collate import collate
from finetune.data.layout import Layout
from finetune.data.packs import MULTIPLE
from finetune.data.plan import Plan, RankView
from finetune.engine import invariants
from finetune.engine.checkpoint import (
    best,
    checkpoints,
    output_folder,
    tensor_files,
    tokenizer_files,
)
from finetune.engine.kernels import by_document
from finetune.engine.model import expert_load, generation_config, loaded_weights, router_loss
from finetune.engine.model.loading import keep_4bit_layout
from finetune.engine.model.trial import is_fused_head_exact
from finetune.engine.monitoring import token_statistics
from finetune.engine.monitoring.token_statistics import TokenStatistics
from finetune.engine.monitoring.wrong_bits import WrongBits
from finetune.engine.optimizer import master_weights
from finetune.engine.sharding import checkpoint_weights, shard
from finetune.engine.training import evaluation, recompute, state_files
from finetune.engine.training.batches import (
    PREDICTING,
    PlanLoader,
    eval_datasets,
    own_part,
    predicting,
    targets,
    to_device,
    unwrap_host_tensors,
)
from finetune.engine.training.ddp_buckets import DdpBuckets
from finetune.engine.training.decoder_graphs import DecoderGraphs
from finetune.engine.training.loss import (
    StepStatistics,
    has_fused_head,
    loss_from_mean,
    loss_of_part,
)
from finetune.engine.training.recompute import EVERYTHING_KEPT, Recomputation
from finetune.engine.training.schedule import explain_schedule_error
from finetune.engine.training.state_files import explain_load_error
from finetune.errors import RunError, UserError
from finetune.runtime import files
from finetune.runtime.bootstrap import Stack
from finetune.runtime.machine import flash
from finetune.runtime.ranks import activity, distributed, interrupt, launcher
from finetune.runtime.ranks.context_group import ALONE, ContextGroup
from finetune.runtime.types import JsonObject
from patches import unsloth_fused_loss_waits


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
    graphs: DecoderGraphs | None = None  # while it trains with them
    wrong_bits: WrongBits | None = None  # set by the monitor
    _trained: list[torch.nn.Parameter] | None = None  # the weights whose gradients are clipped

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
        recomputation: Recomputation = EVERYTHING_KEPT,
        reduces_once: bool | None = None,
        weights: str = master_weights.FLOAT32,
        saved_dtype: torch.dtype | None = None,
        context: ContextGroup = ALONE,
        **further: Any,
    ) -> None:
        """
        Args:
            args: as `training_arguments` returns them.
            recomputation: which activations are computed again in the backward pass; can be set again between steps by
                `set_recomputation`.
            reduces_once: of a model that must be sharded: whether accumulated gradients are reduced in a step's last
                pass only. None for other runs.
            eval_layout: the held-out rows, or several sets of them by name.
            weights: how the trained weights are kept, as `master_weights.WeightPrecision.kind`.
            saved_dtype: of the weights in a saved model; None saves them as they are. Checkpoints keep what they are.
            context: the ranks that share each row.
            further: arguments of TRL's constructor that concern neither data nor loss, such as `peft_config`.
        """
        self.stack = stack
        self.plan = plan
        self.layout = layout
        self.context = context
        self.eval_layout = eval_layout
        self.resumed_step = 0  # optimizer step at which a resumed run starts
        self.retention = checkpoints.Retention()
        self.manifest: JsonObject = {}  # fields of each checkpoint's manifest beside step, plan and files
        self._rebuilds = False
        self.before_first_step: Callable[[], None] | None = None  # called once, before the model is wrapped
        self.sharded = shard.is_sharded(model)
        if stack.device == "cpu":
            keep_4bit_layout(model)
        self.recomputation = recomputation
        self.reduces_once = reduces_once
        self.weights = weights
        self.saved_dtype = saved_dtype
        self._in_checkpoint = False
        self.current_gradient_accumulation_steps = args.gradient_accumulation_steps  # transformers sets it in a step
        self.until_end = contextlib.ExitStack()  # of what is installed for the time of the training
        self.load_balancing: router_loss.LoadBalancing | None = None
        self.statistics = StepStatistics()
        self._uneven = stack.backend == "unsloth" and flash.is_enabled()
        self._of_pack = by_document.arguments_of_pack(model, stack.backend)
        router_loss.check(model, args.router_aux_loss_coef)
        given = {id(one): one.data for one in model.parameters() if one.requires_grad}
        super().__init__(
            model=model,
            args=args,
            train_dataset=layout.rows.dataset,
            eval_dataset=eval_datasets(eval_layout),
            processing_class=tokenizer,
            data_collator=self.collate_rows,
            callbacks=callbacks,
            **further,
        )
        quantized = any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))
        for one in self.model.parameters() if quantized else ():
            if one.requires_grad and one.dtype == torch.bfloat16:  # TRL's choice, which rounds every update to 8 bits
                one.data = given.get(id(one), one.data.float())
        if self.aux_loss_enabled:  # by TRL's rules
            if context.size > 1:
                raise UserError(
                    f"training.context_parallel is {context.size}, and the load-balancing loss is a mean over each "
                    f"document, of which each GPU has a part. {router_loss.OFF}"
                )
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
        self.model.register_forward_pre_hook(unwrap_host_tensors, with_kwargs=True, prepend=True)
        self.statistics.expert_load = expert_load.install(self.model)
        self._buckets = DdpBuckets()
        self._step_tokens: int | None = None  # of all ranks' documents in the step that is trained
        self.eval_document_losses: list[float] = []  # of the last evaluation, all ranks
        self._eval_tokens: TokenStatistics | None = None  # of the last micro-batch
        # Unsloth's version of TRL's class may leave it out, for a transformers model in a program that imports Unsloth.
        self._has_fused_head = "unsloth" not in sys.modules or has_fused_head(self.model)
        if self._has_fused_head and stack.backend == "transformers" and stack.device == "cuda":
            with self.compute_loss_context_manager():
                exact = is_fused_head_exact(self.model)
            self._has_fused_head = all(distributed.gather_objects(exact))
        self._counts_checked = False

    def get_optimizer_cls_and_kwargs(self, args: TrainingArguments, model: Any = None) -> tuple[type, JsonObject]:  # type: ignore[override]
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

    def create_optimizer(self, *args: object, **kwargs: object) -> torch.optim.Optimizer:
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
        with explain_schedule_error(self.args.lr_scheduler_type, self.args.lr_scheduler_kwargs):
            return super().create_scheduler(*args, **kwargs)

    def use_evaluation_weights(self) -> None:
        """Put the weights that the optimizer promises into the model: a schedule-free one trains at another point, to
        which `training_step` returns. Others have one set of weights."""
        if callable(switch := getattr(self.optimizer, "eval", None)):
            switch()

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
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
            rank=self.context.data_rank,
            world_size=self.context.data_ranks,
            per_device=self.args.per_device_train_batch_size,
            accumulation=self.args.gradient_accumulation_steps,
            epoch=epoch,
            start=step * self.args.gradient_accumulation_steps,
        )
        return PlanLoader(
            self.layout,  # type: ignore[arg-type]  # duck-typed map-style dataset
            batch_sampler=view,
            collate_fn=functools.partial(self.collate_rows, pack_length=self.layout.packs.pack_length),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.stack.device == "cuda",
            # Without its own generator the loader draws a seed from the global one, which would change the dropout
            # masks of a resumed run.
            generator=torch.Generator().manual_seed(self.args.seed),
        )

    def collate_rows(self, rows: Any, pack_length: int | None = None) -> JsonObject:
        """A micro-batch of these rows, on the host."""
        pad = self.processing_class.pad_token_id or 0  # masked, so any token will do
        shared = self.context.size > 1
        multiple = self.context.size * MULTIPLE if shared else None
        batch = collate(rows, pad_token_id=pad, pack_length=pack_length, uneven=self._uneven, multiple=multiple)
        if shared:
            batch = own_part(batch, self.context)
        if self.statistics.expert_load is None and self.load_balancing is None:
            batch.pop("document_lengths")
        return batch

    def _prepare_inputs(self, inputs: JsonObject) -> JsonObject:
        """Move a micro-batch to the device without blocking; transformers' method blocks on each tensor."""
        labels, asks = inputs.get("labels"), self.stack.backend == "unsloth" and self.stack.device == "cuda"
        if asks and labels is not None and not labels.is_cuda and self.context.size == 1:
            inputs = {**inputs, PREDICTING: predicting(labels).pin_memory()}
        return to_device(inputs, self.args.device, self._of_pack)

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[JsonObject], torch.Tensor | None]:
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
        if self.wrong_bits is not None:
            self.wrong_bits.before_pass(batches[0], count)
        return batches, count

    def loss_apart(self, inputs: JsonObject, count: torch.Tensor) -> torch.Tensor:
        """The loss of a training pass that leaves nothing behind but random numbers drawn."""
        before, self.statistics = self.statistics, StepStatistics()
        self.model.train()
        try:
            with self.compute_loss_context_manager():
                given = self._prepare_inputs(dict(inputs))
                return type(self).compute_loss(self, self.model, given, num_items_in_batch=count).detach()
        finally:
            self.statistics = before

    def _check_count(self, batches: list[JsonObject], planned: int) -> None:
        """Check, once per run, that the ranks' supervised tokens add up to the plan's count.

        Raises:
            RunError: they do not.
        """
        if self.context.processes < self.context.size:  # the rest of the rows is nowhere
            return
        own = sum(int((targets(batch) != IGNORE_INDEX).sum()) for batch in batches)
        total = int(distributed.sum_over_ranks([own])[0])
        if total != planned:
            raise RunError(
                f"The loss of step {self.state.global_step} would be scaled wrongly: the ranks hold {total} supervised "
                f"tokens, the plan expects {planned}. Delete the data cache and prepare the data again."
            )
        self._counts_checked = True

    def set_batch(self, batch: Batch) -> None:
        """Divide each step in another way, before the first."""
        self.args.per_device_train_batch_size = self._train_batch_size = batch.per_device
        self.args.gradient_accumulation_steps = batch.accumulation

    def set_recomputation(self, recomputation: Recomputation) -> None:
        """Compute other activations again in the backward pass, from the next forward pass on. The result is the same.

        Raises:
            UserError: the backend or the model cannot do it.
        """
        recompute.apply(self.model, recomputation, self.stack)
        self.recomputation = recomputation

    # --- loss -------------------------------------------------------------------------------------------------------

    def compute_loss(  # type: ignore[override]
        self,
        model: torch.nn.Module,
        inputs: JsonObject,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """This rank's share of the step's loss, times the world size; every argument is passed on.

        A mean over each micro-batch would weigh a token by how many others happen to share its micro-batch, so the
        result would change with accumulation, packing and world size. So every pass returns the sum of its token losses
        divided by the tokens of the whole step: the passes of all ranks then add up to the loss of the step, however
        its rows were dealt. DDP averages gradients over ranks, which the factor undoes. A loss with `return_outputs`
        or without a count is someone else's (a callback's, TRL's), and stays as it is defined there.

        Args:
            num_items_in_batch: supervised tokens of the global batch. Without it the loss is the micro-batch's mean.
        """
        lengths, places = inputs.pop("document_lengths", None), inputs.pop(PREDICTING, None)
        if return_outputs or num_items_in_batch is None:
            return super().compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch, **kwargs
            )
        with contextlib.ExitStack() as passes:
            if places is not None:
                passes.enter_context(unsloth_fused_loss_waits.known(places, inputs["labels"].numel()))
            if lengths is None or not torch.is_grad_enabled():
                return self._token_loss(model, inputs, num_items_in_batch, **kwargs)
            tokens = inputs["input_ids"].numel()
            share = 1 / (self._step_tokens or tokens)  # a trial of a micro-batch has no step
            if (load := self.statistics.expert_load) is not None:
                passes.enter_context(load.forward(lengths, tokens))
            if self.load_balancing is not None:
                passes.enter_context(self.load_balancing.forward(lengths, tokens, share, self._scale()))
            loss = self._token_loss(model, inputs, num_items_in_batch, **kwargs)
        if self.load_balancing is None:
            return loss
        loss, value = self.load_balancing.attach(loss)
        self.statistics.add_load_balancing(value)
        return loss

    def _token_loss(
        self, model: torch.nn.Module, inputs: JsonObject, num_items_in_batch: torch.Tensor, **kwargs: Any
    ) -> Any:
        """`compute_loss`, without the gradient of a term that is no sum over supervised tokens."""
        loss: Any
        if self.stack.backend == "transformers" and self.stack.device == "cuda" and self._has_fused_head:
            # TRL's fused head computes token losses without keeping the logits, also for a model whose own loss ignores
            # the count. TRL's own compute_loss around it syncs with the GPU several times per step, to average metrics.
            outputs = model(**inputs, use_cache=False, fused_lm_head=True)
            self._note_tokens(outputs, inputs)
            loss = -outputs.log_probs.sum() / num_items_in_batch * self._scale()
        elif self.context.size > 1:
            loss, outputs = loss_of_part(model, inputs, num_items_in_batch)
            self._note_tokens(outputs, inputs)
            loss = loss * self._scale()
        elif not self.model_accepts_loss_kwargs:
            loss = loss_from_mean(model, inputs, num_items_in_batch) * self._scale()
        elif self.stack.backend == "unsloth" and torch.is_grad_enabled():
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch, **kwargs)
        else:
            # TRL's fused head needs Triton and a GPU; transformers' loss does not.
            loss, outputs = transformers.Trainer.compute_loss(
                self, model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch, **kwargs
            )
            self._note_tokens(outputs, inputs)
        # DDP and accelerate modify the loss in place, which fails on a view from a fused kernel (unsloth issue 3452).
        return loss.clone() if loss._is_view() else loss

    def _note_tokens(self, outputs: object, inputs: JsonObject) -> None:
        """Keep what this forward pass yields besides the loss: in evaluation whatever it has."""
        if torch.is_grad_enabled():
            self.statistics.add_tokens(outputs)
        else:
            self._eval_tokens = token_statistics.from_outputs(outputs, targets(inputs))

    def _scale(self) -> int:
        """What this rank's share of a step's loss is multiplied by: DDP averages over ranks, and unless
        `loss_is_scaled_for_ga` is set, `training_step` divides by the accumulation for models that ignore counts."""
        divided = torch.is_grad_enabled() and not self.model_accepts_loss_kwargs and not self.loss_is_scaled_for_ga
        return self.args.world_size * (self.current_gradient_accumulation_steps if divided else 1)

    def training_step(
        self, model: torch.nn.Module, inputs: JsonObject, num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Forward and backward of one micro-batch; the loss stays on the device."""
        if self.sharded:
            shard.set_reduction(self.model, self.accelerator.sync_gradients or not self.reduces_once)
        ends_step = self.accelerator.sync_gradients
        self._buckets.before_micro_batch(model, reduces=ends_step)
        with _in_its_mode(model):
            loss = super().training_step(model, inputs, num_items_in_batch)
        if self.graphs is not None and ends_step:
            self.graphs.gradients.check()
            if self.args.world_size > 1:
                self.average_gradients()
        if self.load_balancing is not None:
            self.load_balancing.end()
        if self.sharded:
            invariants.check_loss(loss)
        self._buckets.after_micro_batch(model)
        self.statistics.add_loss(loss, ends_step=ends_step)
        return loss

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        """As in transformers, without a walk over all modules in each step."""
        if self.sharded:
            return super()._clip_grad_norm(model)
        if self._trained is None:
            self._trained = [one for one in model.parameters() if one.requires_grad]
        return self.accelerator.clip_grad_norm_(self._trained, self.args.max_grad_norm)

    def average_gradients(self) -> None:
        """Reduce the gradients of replayed passes, which DDP does not."""
        assert self.graphs is not None
        self.graphs.gradients.average()

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """As in transformers. Before training, when accelerate has not prepared the model yet, also in its precision:
        passes that measure must compute as training will."""
        found = super().compute_loss_context_manager()
        if not hasattr(self.model, "_original_forward"):
            found.enter_context(self.accelerator.autocast())
        return found

    def floating_point_ops(self, inputs: JsonObject) -> int:
        """0: callbacks count them from the plan when they log. transformers would walk all modules on every call."""
        return 0

    # --- evaluation -------------------------------------------------------------------------------------------------

    @interrupt.busy()
    @activity.during("evaluation")
    @torch.no_grad()
    def evaluate(  # type: ignore[override]
        self,
        eval_dataset: Layout | Mapping[str, Layout] | str | None = None,
        ignore_keys: list[str] | None = None,
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
        metrics, self.eval_document_losses = evaluation.evaluate_rows(self, layout, prefix)
        self.model.train(was_training)
        return metrics

    def recorded_rows(self, layout: Layout) -> int | None:
        """Rows of a micro-batch that CUDA graphs replay, if they can replay those of `layout`."""
        alike = self.graphs is not None and layout.packs.pack_length == self.layout.packs.pack_length
        return self.args.per_device_train_batch_size if alike else None

    def evaluation_pass(
        self, layout: Layout, rows: list[int], count: torch.Tensor
    ) -> tuple[torch.Tensor, JsonObject, TokenStatistics | None]:
        """Forward pass on some rows of `layout`. Returns this rank's share of the loss, the inputs, and the statistics
        of their tokens if the model yields them.

        Args:
            count: what the sum of the token losses is divided by, an int64 scalar on the device.
        """
        batch = self.collate_rows(layout.__getitems__(rows), pack_length=layout.packs.pack_length)
        inputs, self._eval_tokens = self._prepare_inputs(batch), None
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            loss = self.compute_loss(self.model, inputs, num_items_in_batch=count)
        found, self._eval_tokens = self._eval_tokens, None
        return loss, inputs, found

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in transformers. Every rank calls it if the model is sharded."""
        self.use_evaluation_weights()
        if not self.sharded:
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(output_dir or self.args.output_dir)
        with generation_config.without_model_config(self.model):
            checkpoint_weights.save_model(self.model, folder, self.saved_dtype, self._in_checkpoint)
        if self.args.should_save:
            self._save_tokenizer_and_generation_config(folder)
        distributed.barrier()

    def _save_tokenizer_and_generation_config(self, folder: Path) -> None:
        """Generation config and tokenizer. Beside an adapter, the former has the end tokens that export and chat add to
        the base's. PEFT's model card, which is empty and has the base model's path on this machine, is left out."""
        files.remove(folder / "README.md")  # the folder is new: nobody else has written there
        tokenizer = self.processing_class
        ends = [tokenizer.eos_token_id, *generation_config.trained_end_tokens(tokenizer, self.layout.rows)]
        generation_config.write(folder, self.model, ends)
        tokenizer_files.save(tokenizer, folder)

    @contextlib.contextmanager
    def keep_dtypes(self) -> Iterator[None]:
        """Context in which models are saved as they are trained, to be loaded again; not in `saved_dtype`."""
        self._in_checkpoint = True
        try:
            yield
        finally:
            self._in_checkpoint = False

    @activity.during("reading the checkpoint")
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """An adapter as in transformers; of a sharded model each rank reads its part. A slow disk is waited for."""
        if self.sharded or getattr(self.model, "peft_config", None) is None:
            checkpoint_weights.load_model(self.model, Path(resume_from_checkpoint))
        else:
            with loaded_weights.require_all():
                super()._load_from_checkpoint(resume_from_checkpoint, model)
        distributed.barrier()

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
    def _save_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        """Write checkpoint-N under a temporary name; rename it once all ranks' files and the manifest are there."""
        output_dir = Path(self.args.output_dir)
        target = output_dir / f"checkpoint-{self.state.global_step}"
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(target)  # on every rank: all load it in the end
        with (
            output_folder.explain_full_disk(output_dir, target.name),
            checkpoints.staging(target, main=self.args.should_save) as staging,
        ):
            distributed.barrier()
            with self.keep_dtypes():
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
                    "batch": {
                        "per_device": self.args.per_device_train_batch_size,
                        "global_batch_size": self.plan.global_batch_size,
                        "world_size": self.context.data_ranks,  # ranks that share rows count as one
                    },
                    "launch": launcher.launch_id(),
                }
                checkpoints.seal(staging, fields | self.manifest)
        if self.args.should_save:
            kept = Path(self.state.best_model_checkpoint or target).name
            checkpoints.rotate(output_dir, self.retention, target.name, kept)
            output_folder.archive_later_checkpoints(output_dir, self.state.global_step, self.retention.damaged)
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
        with generation_config.without_model_config(unwrapped):
            unwrapped.save_pretrained(folder, state_dict=state_dict, safe_serialization=True)
        if dtype is not None:  # also in a checkpoint: whoever loads it gets the model
            unwrapped.config.dtype = dtype
            unwrapped.config.save_pretrained(folder)
        self._save_tokenizer_and_generation_config(Path(folder))

    @activity.during("reading the checkpoint")
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load both on the host; the optimizer moves its state to the devices of its parameters.

        transformers maps the file to the device of `args`, which fails for ranks on a CPU ("tagged with cpu:0").
        """
        if checkpoint is not None:
            state_files.load_optimizer_and_schedule(
                Path(checkpoint),
                self.optimizer,
                self.lr_scheduler,
                sharded=self.sharded,
                rebuild=self._rebuilds,
                step=self.resumed_step,
            )
            distributed.barrier()

    def _load_best_model(self) -> None:
        """Load the weights of the best evaluation, verified, on every rank."""
        self.use_evaluation_weights()
        checkpoint = Path(self.state.best_model_checkpoint)
        if checkpoint.name == f"checkpoint-{self.state.global_step}":
            return  # these are the weights in memory
        best.verify_best_checkpoint(checkpoint, Path(self.args.output_dir, f"checkpoint-{self.state.global_step}"))
        with explain_load_error(checkpoint):
            self._load_from_checkpoint(str(checkpoint))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        rng_file = f"rng_state_{self.args.process_index}.pth" if self.args.world_size > 1 else "rng_state.pth"
        with explain_load_error(Path(str(checkpoint), rng_file)):
            super()._load_rng_state(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        with explain_load_error(Path(str(checkpoint), "scaler.pt")):
            super()._load_scaler(checkpoint)

    def _init_training_state(self, max_steps: int, *args: object, **kwargs: object) -> Any:
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

    def train(self, resume_from_checkpoint: str | None = None, *, rebuild: bool = False, **kwargs: Any) -> Any:  # type: ignore[override]
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
        with explain_load_error(state):
            reached = transformers.TrainerState.load_from_json(str(state))
            if reached.global_step != self.resumed_step or not isinstance(reached.log_history, list):
                raise ValueError(f"it is not of step {self.resumed_step}, or has no list of records")
        trackers = [one for one in self.callback_handler.callbacks if isinstance(one, best.BestModel)]
        ended = [one for one in trackers if one.ended_at(self.args, reached, self.total_steps)]
        for tracker in ended:
            tracker.stopped_at = self.resumed_step if self.resumed_step < self.total_steps else None
        if self.resumed_step < self.total_steps and not ended:
            return self._train_to_end(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        return self._train_zero_steps(resume_from_checkpoint)

    def _train_to_end(self, **kwargs: Any) -> Any:
        self.set_recomputation(self.recomputation)
        self._trained = None  # a script may have frozen or unfrozen weights since
        with self.until_end:
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
def _in_its_mode(model: torch.nn.Module) -> Iterator[None]:
    """Context in which a model in training mode is not put into it once more: transformers does so in each pass, with a
    walk over all modules that takes the host as long as launching hundreds of kernels."""
    if not (model.training and getattr(model, "module", model).training):  # DDP's wrapper has a mode of its own
        yield
        return
    vars(model)["train"] = lambda mode=True: model
    try:
        yield
    finally:
        del vars(model)["train"]
