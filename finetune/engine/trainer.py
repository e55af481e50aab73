"""The SFTTrainer subclass: data from the plan, a loss that is exact at any world size, checkpoints that are whole.

Imported after `bootstrap.start`: on the unsloth backend `trl.SFTTrainer` is by then the class that Unsloth rewrote.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from torch.utils.data import DataLoader
from transformers.trainer_callback import ExportableState

from finetune.config import Batch, Config, scaled_learning_rate
from finetune.data.collate import collate
from finetune.data.layout import Layout
from finetune.data.plan import Plan, RankView
from finetune.engine import checkpoints
from finetune.engine.model import resolve_dtype
from finetune.errors import RunError, UserError
from finetune.runtime import activity, distributed, files, interrupt, launcher
from finetune.runtime.bootstrap import Stack


def arguments(config: Config, stack: Stack, batch: Batch, *, evaluate: bool) -> trl.SFTConfig:
    """TRL's arguments for a resolved configuration."""
    training = config.training
    dtype = resolve_dtype(config, stack)
    checkpointing = bool(training.gradient_checkpointing)
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
        bf16=stack.device == "cuda" and dtype == torch.bfloat16,
        fp16=stack.device == "cuda" and dtype == torch.float16,
        use_cpu=stack.device == "cpu",
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if checkpointing else None,
        save_strategy="steps" if training.save_steps else "no",
        save_steps=training.save_steps or 500,
        eval_strategy="steps" if evaluate and training.eval_steps else "no",
        eval_steps=training.eval_steps or None,
        logging_steps=config.logging.logging_steps,
        ddp_timeout=training.ddp_timeout,
        # Every trainable weight of a dense model takes part in every step. The search for unused ones costs a walk of
        # the graph a step, and with reentrant checkpointing it ends in "marked as ready twice".
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,  # rotary tables: the same on all ranks, and constant
    )
    settings |= training.extra
    settings |= dict(  # what this project does itself
        average_tokens_across_devices=True,
        logging_nan_inf_filter=False,  # it would hide a loss that is not finite, and waits for the GPU at every step
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        packing=False,
        padding_free=False,
        max_length=None,
        ignore_data_skip=True,  # the plan starts at the right step: nothing has to be skipped
        disable_tqdm=True,
        report_to="none",
    )
    return trl.SFTConfig(**_with_present_names(settings))


def _with_present_names(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with `gradient_checkpointing*` under the names that replace them from transformers 5.18 on."""
    present = {field.name for field in dataclasses.fields(trl.SFTConfig)}
    settings = dict(settings)
    for kind in ("checkpointing", "checkpointing_kwargs"):
        if f"activation_{kind}" in present and f"gradient_{kind}" in settings:
            settings.setdefault(f"activation_{kind}", settings.pop(f"gradient_{kind}"))
    return settings


class SFTTrainer(trl.SFTTrainer):
    """TRL's trainer with the data order, the loss, the evaluation and the checkpoints of this project.

    loss of a step = sum of the token losses of the whole global batch / number of its label tokens, at any world size
    and accumulation; each rank's share carries the factor world size that DDP's mean takes out again.
    """

    # transformers types these as what they may be at any time; here they are there.
    model: Any
    args: Any
    state: Any
    optimizer: Any
    lr_scheduler: Any
    processing_class: Any

    def __init__(
        self,
        *,
        model: Any,
        args: trl.SFTConfig,
        tokenizer: Any,
        stack: Stack,
        plan: Plan,
        layout: Layout,
        eval_layout: Layout | None = None,
        callbacks: list[transformers.TrainerCallback] | None = None,
    ) -> None:
        self.stack = stack
        self.plan = plan
        self.layout = layout
        self.eval_layout = eval_layout
        self.resumed_step = 0  # the optimizer step that a resumed run starts from
        self.retention = checkpoints.Retention()
        self.manifest: dict[str, Any] = {}  # what each checkpoint's manifest says beside step, plan and files
        self._rebuilds = False
        super().__init__(
            model=model,
            args=args,
            train_dataset=layout.rows.dataset,
            eval_dataset=eval_layout.rows.dataset if eval_layout else None,
            processing_class=tokenizer,
            data_collator=self._collate,
            callbacks=callbacks,
        )
        self.remove_callback(transformers.PrinterCallback)
        if self.accelerator.ddp_handler is not None and getattr(model, "peft_config", None) is None:
            # Where all weights are trained the gradients are views of DDP's buckets, not copies beside them (D9).
            self.accelerator.ddp_handler.gradient_as_bucket_view = True
        model.register_forward_pre_hook(_from_host, with_kwargs=True)
        self.step_losses: list[torch.Tensor] = []  # this rank's share of each step's loss since the last record
        self._step_loss: torch.Tensor | None = None
        self._counts_checked = False
        self._gradients_in_buckets = self._first_buckets_freed = False

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """As transformers has it. Many of its optimizers are in packages of their own.

        Raises:
            UserError: the package is not installed, or the optimizer lacks an argument.
        """
        try:
            return trl.SFTTrainer.get_optimizer_cls_and_kwargs(args, model)
        except (ImportError, ValueError) as error:
            name = getattr(args.optim, "value", args.optim)
            raise UserError(f"training.optim: {name} cannot be used here: {error}") from error

    # --- data -------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        """This rank's view of the plan. Not sent through accelerate's `prepare`, which would deal the rows again."""
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
            self.layout,  # type: ignore[arg-type]  # it has what a map-style data set needs
            batch_sampler=view,
            collate_fn=self._collate,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.stack.device == "cuda",
            # A loader without a generator draws a seed from the global one: a resumed run would then drop out other
            # units than the run that it continues.
            generator=torch.Generator().manual_seed(self.args.seed),
        )

    def _collate(self, rows: Any) -> dict[str, Any]:
        pack_length = self.layout.packs.pack_length
        batch = collate(rows, pad_token_id=self.processing_class.pad_token_id, pack_length=pack_length)
        if self.stack.backend == "transformers":  # it reads the documents' borders from the position ids
            batch.pop("packed_seq_lengths", None)
        return batch

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Move a micro-batch to the device, but for the lengths of its documents: Unsloth reads them on the host, and
        would have to wait for the device to get them back. DDP would move them, too.

        The host does not wait for the copies: it launches the forward pass while the device still works on the
        micro-batch before. transformers' own method waits, tensor by tensor.
        """
        lengths = inputs.pop("packed_seq_lengths", None)
        moved = {name: value.to(self.args.device, non_blocking=True) for name, value in inputs.items()}
        return moved if lengths is None else {**moved, "packed_seq_lengths": _OnHost(lengths)}

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], torch.Tensor | None]:
        """The micro-batches of one optimizer step, and the label tokens of the whole global batch.

        The plan knows that number beforehand, so counting costs neither a collective nor a wait for the GPU.
        """
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        if not batches:
            return batches, None
        epoch, step = divmod(self.state.global_step, self.plan.steps_per_epoch)
        planned = self.plan.label_tokens_of_step(epoch, step)
        if not self._counts_checked:
            self._check_count(batches, planned)
        count = torch.tensor(planned, dtype=torch.int64)
        if self.stack.device == "cuda":
            count = count.pin_memory().to(device, non_blocking=True)
        return batches, count

    def _check_count(self, batches: list[dict[str, Any]], planned: int) -> None:
        """Once a run: the labels that all ranks hold for this step are those that the plan divides by."""
        own = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        held = int(distributed.sum_over_ranks([own])[0])
        if held != planned:
            raise RunError(
                f"The ranks hold {held} label tokens for step {self.state.global_step} and the plan counts {planned}: "
                "the loss would be scaled wrongly. Delete the data cache and prepare the data again."
            )
        self._counts_checked = True

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
            num_items_in_batch: label tokens of the global batch. Without it each micro-batch is a mean of its own.
        """
        if return_outputs or num_items_in_batch is None:
            return super().compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch, **kwargs
            )
        loss: Any
        if not self.model_accepts_loss_kwargs:
            loss = self._loss_of_model_that_ignores_counts(model, inputs, num_items_in_batch)
        elif self.stack.backend == "unsloth" and torch.is_grad_enabled():
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch, **kwargs)
        elif self.stack.backend == "transformers" and self.stack.device == "cuda":
            # TRL's head computes the token losses without keeping the logits. Its own compute_loss around it waits for
            # the GPU several times a step, to average metrics.
            outputs = model(**inputs, use_cache=False, fused_lm_head=True)
            loss = -outputs.log_probs.sum() / num_items_in_batch * self.args.world_size
        else:
            # TRL's fused head needs Triton and a GPU; transformers' loss does not.
            loss = transformers.Trainer.compute_loss(
                self, model, inputs, num_items_in_batch=num_items_in_batch, **kwargs
            )
        # A fused loss returned as a view cannot be modified in place, as DDP and accelerate do (unsloth issue 3452).
        return loss.clone() if loss._is_view() else loss

    def _loss_of_model_that_ignores_counts(
        self, model: Any, inputs: dict[str, Any], total: torch.Tensor
    ) -> torch.Tensor:
        """The same loss from a model whose forward ignores the count and returns the mean over its micro-batch."""
        own = (inputs["labels"][:, 1:] != -100).sum()
        outputs = model(**inputs)
        mean = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        mean = torch.where(own > 0, mean, torch.zeros_like(mean))  # a mean over no label is not a number
        # `training_step` divides by the accumulation for such models, in training only.
        parts = self.current_gradient_accumulation_steps if torch.is_grad_enabled() else 1
        return mean * own / total * self.args.world_size * parts

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of one micro-batch; keeps the loss on the device."""
        self._keep_gradients_in_buckets(model)
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._free_first_buckets(model)
        self._step_loss = loss if self._step_loss is None else self._step_loss + loss
        if self.accelerator.sync_gradients:
            self.step_losses.append(self._step_loss)
            self._step_loss = None
        return loss

    def _keep_gradients_in_buckets(self, model: Any) -> None:
        """Once, under accumulation: have the gradients live in DDP's buckets and nowhere else (docs/defects.md, D9).

        A micro-batch that does not reduce adds to a gradient where that is; where there is none, it makes one beside
        the bucket. So the first micro-batch of all reduces, too, which leaves views of the buckets. The last one takes
        the mean of that mean over the ranks, which is the same. From then on gradients are set to zero in place.
        """
        accumulates = not self.accelerator.sync_gradients and getattr(model, "gradient_as_bucket_view", False)
        if accumulates and not self._gradients_in_buckets:
            model.require_backward_grad_sync = True  # of this micro-batch: the end of `no_sync` sets it again
            model.zero_grad = functools.partial(model.zero_grad, set_to_none=False)
            self._gradients_in_buckets = True

    def _free_first_buckets(self, model: Any) -> None:
        """Once, after the first micro-batch that reduces: have NCCL let go of DDP's buckets (docs/defects.md, D8).

        DDP makes others in their place before the next one that does. On a rank whose host is ahead of its GPU NCCL's
        process group would hold them on, as much memory as all gradients. It costs one wait for that micro-batch.
        """
        if not self._first_buckets_freed and getattr(model, "require_backward_grad_sync", False):
            distributed.drain_nccl_work()
            self._first_buckets_freed = True

    def drain_step_losses(self) -> list[float]:
        """Losses of the steps since the last call, in nats per label token, equal on all ranks; waits for the GPU."""
        if not self.step_losses:
            return []
        own = torch.stack(self.step_losses).double().tolist()
        self.step_losses.clear()
        return [total / self.args.world_size for total in distributed.sum_over_ranks(own)]

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Counted from the plan at logging steps instead (see callbacks): transformers walks all modules each time."""
        return 0

    # --- evaluation -------------------------------------------------------------------------------------------------

    @interrupt.busy()
    @activity.during("evaluation")
    @torch.no_grad()
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Mean loss over the label tokens of the held-out rows, each row once.

        The same number at any world size and evaluation batch size: sums are taken over all ranks, then divided.
        """
        layout = self.eval_layout
        if layout is None:
            raise ValueError("evaluate needs held-out rows: set data.eval_file or data.eval_fraction")
        was_training = self.model.training
        self.model.eval()
        total = 0.0
        one = torch.ones((), dtype=torch.int64, device=self.args.device)  # ask for sums: divide by one label token
        size = self.args.per_device_eval_batch_size
        order = layout.largest_first()[self.args.process_index :: self.args.world_size]
        losses = []
        for start in range(0, len(order), size):
            activity.enter("evaluation")  # anew: a long evaluation is not a long phase as long as it gets on
            batch = self._collate(layout.__getitems__(order[start : start + size].tolist()))
            with self.compute_loss_context_manager():
                loss = self.compute_loss(self.model, self._prepare_inputs(batch), num_items_in_batch=one)
            losses.append(loss.double() / self.args.world_size)
        if losses:
            total = float(torch.stack(losses).sum())
        summed, labels = distributed.sum_over_ranks([total, float(layout.label_tokens[order].sum())])
        self.model.train(was_training)
        metrics = {f"{metric_key_prefix}_loss": summed / labels}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @interrupt.busy()
    @activity.during("saving")
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write checkpoint-N under another name, and rename it when every rank's part is there and sealed."""
        output_dir = Path(self.args.output_dir)
        target = output_dir / f"checkpoint-{self.state.global_step}"
        with (
            checkpoints.no_space(output_dir, target.name),
            checkpoints.staging(target, main=self.args.should_save) as staging,
        ):
            distributed.barrier()
            self.save_model(str(staging), _internal_call=True)
            if not self.args.save_only_model:
                self._save_optimizer_and_scheduler(str(staging))
                self._save_scaler(str(staging))
                self._save_rng_state(str(staging))
                if not self.args.should_save:  # the rank that writes syncs the rest, perhaps from another machine
                    files.sync_file(staging / f"rng_state_{self.args.process_index}.pth")
            if self.args.should_save:
                self._save_state(staging, output_dir)
            distributed.barrier()
            if self.args.should_save:
                about = {"step": self.state.global_step, "plan": self.plan.digest(), "launch": launcher.launch_id()}
                about |= self.manifest
                checkpoints.seal(staging, about)
        if self.args.should_save:
            best = Path(self.state.best_model_checkpoint or target).name
            checkpoints.rotate(output_dir, self.retention, target.name, best)
        distributed.barrier()

    def _save_state(self, staging: Path, output_dir: Path) -> None:
        if self.state.best_global_step:
            self.state.best_model_checkpoint = str(output_dir / f"checkpoint-{self.state.best_global_step}")
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                self.state.stateful_callbacks[type(callback).__name__] = callback.state()
        self.state.save_to_json(str(staging / "trainer_state.json"))

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Weights, configuration and tokenizer; not the pickled arguments, which run.json says in plain text."""
        folder = str(output_dir or self.args.output_dir)
        unwrapped = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        unwrapped.save_pretrained(folder, state_dict=state_dict, safe_serialization=True)
        self.processing_class.save_pretrained(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Read both on the host; the optimizer moves its state to where its parameters are.

        transformers maps the file to the device of `args`, which fails for ranks on a CPU ("tagged with cpu:0").
        To rebuild them, the optimizer's state and the schedule's position are the checkpoint's, and everything else
        (rates, betas, weight decay, the curve) is this configuration's.
        """
        if checkpoint is None:
            return
        optimizer, schedule = (read_state(Path(checkpoint, name)) for name in ("optimizer.pt", "scheduler.pt"))
        with usable(Path(checkpoint, "optimizer.pt")):
            self._take_optimizer_and_schedule(optimizer, schedule)

    def _take_optimizer_and_schedule(self, optimizer: dict[str, Any], schedule: dict[str, Any]) -> None:
        if not self._rebuilds:
            self.optimizer.load_state_dict(optimizer)
            self.lr_scheduler.load_state_dict(schedule)
            return
        fresh = [
            {name: value for name, value in group.items() if name != "params"} for group in self.optimizer.param_groups
        ]
        self.optimizer.load_state_dict(optimizer)
        for group, values in zip(self.optimizer.param_groups, fresh, strict=True):
            group.update(values)
        move_schedule(self.lr_scheduler, int(schedule.get("last_epoch", self.resumed_step)))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with usable(Path(str(checkpoint), "the states of the random number generators")):
            super()._load_rng_state(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        with usable(Path(str(checkpoint), "scaler.pt")):
            super()._load_scaler(checkpoint)

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        """As transformers does it, but how often to log, save and evaluate is what is asked for now, not what the
        checkpoint's trainer_state.json says."""
        trained = super()._init_training_state(max_steps, *args, **kwargs)
        self.state.compute_steps(self.args, max_steps)
        return trained

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        args = self.args
        return args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * self.plan.steps_per_epoch)

    def train(self, resume_from_checkpoint: str | None = None, *, rebuild: bool = False, **kwargs: Any) -> Any:
        """Train to the end, from the beginning or from a whole checkpoint.

        Args:
            rebuild: the settings of optimizer and schedule are those of this run, not those in the checkpoint.
        """
        self._rebuilds = rebuild
        if resume_from_checkpoint is None:
            self.resumed_step = 0
            return super().train(**kwargs)
        self.resumed_step = checkpoints.manifest(Path(resume_from_checkpoint))["step"]
        state = Path(resume_from_checkpoint, "trainer_state.json")
        with usable(state):
            transformers.TrainerState.load_from_json(str(state))
        if self.resumed_step < self.total_steps:
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        return self._train_no_step(resume_from_checkpoint)

    def _train_no_step(self, checkpoint: str) -> None:
        """Take the weights and the state of a checkpoint that is at the end of the run. transformers would train a step
        first, and only then ask whether it was the last."""
        self._load_from_checkpoint(checkpoint)
        self.state = transformers.TrainerState.load_from_json(str(Path(checkpoint, "trainer_state.json")))
        self.state.max_steps = self.total_steps
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)


@contextlib.contextmanager
def usable(path: Path) -> Iterator[None]:
    """Raises RunError if a checkpoint's file, whole by its checksum, does not hold what it should."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:  # of the GPU that the file's tensors go to
        raise
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise RunError(
            f"{path} cannot be used: {lines[0][:200]}. Resume from another checkpoint, or start a new run."
        ) from error


def read_state(path: Path) -> dict[str, Any]:
    """A file of tensors and plain values, onto the host. No code in it runs.

    Raises:
        RunError: it holds something else.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise RunError(
            f"{path} is not a file of tensors: {str(error).splitlines()[0][:200]} Resume from another checkpoint."
        ) from error


def move_schedule(schedule: Any, step: int) -> None:
    """Set a schedule that has just been made to optimizer step `step`, and the rates of its optimizer with it.

    Schedules that depend on measurements (reduce_lr_on_plateau, greedy) have no position; they start anew.
    """
    if not isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):
        return
    schedule.last_epoch = step
    schedule._step_count = step + 1
    schedule._last_lr = [
        base * factor(step) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for group, rate in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
        group["lr"] = rate


class _OnHost:
    """A tensor of a forward's arguments that DDP leaves where it is: it moves all that it knows for tensors."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _from_host(model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward hook of the model inside DDP: the tensors themselves."""
    return args, {name: value.tensor if isinstance(value, _OnHost) else value for name, value in kwargs.items()}


class _PlanLoader(DataLoader):
    """A DataLoader that passes the epoch to its rank view; plain DataLoaders have no `set_epoch`."""

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
