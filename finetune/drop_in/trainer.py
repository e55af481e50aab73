"""TRL's `SFTTrainer` by its own constructor, on this project's plan, loss, evaluation, checkpoints and records.

Import it after the backend has started, as `finetune.drop_in` does.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import transformers
from transformers.trainer_utils import TrainOutput, speed_metrics

from finetune.config import Batch, Config, TrainingConfig, data_ranks
from finetune.data.layout import Layout
from finetune.data.prepare import Data
from finetune.drop_in import backbone, former, names, refusals, rows, settings
from finetune.drop_in.commands import JobTrainer, ScriptCommands
from finetune.drop_in.preparation import Preparation
from finetune.drop_in.script_run import ScriptRun
from finetune.drop_in.start import OVERRIDES, STACK
from finetune.engine import multimodal
from finetune.engine.checkpoint import resume
from finetune.engine.job import Job, assemble, lay_out_eval, lay_out_split
from finetune.engine.kernels import fused_lora, grouped_experts, liger
from finetune.engine.model import experts, positions, tokenizer_loading
from finetune.engine.monitoring import trackers
from finetune.engine.record import RunRecord
from finetune.engine.session import building
from finetune.engine.sharding import shard
from finetune.engine.training import batches
from finetune.engine.training.arguments import training_arguments
from finetune.errors import UserError
from finetune.export import card
from finetune.run import final_model, story
from finetune.runtime import scripts
from finetune.runtime.bootstrap import Stack
from finetune.runtime.command import INTERRUPTED, known_error
from finetune.runtime.ranks import context_group, distributed, interrupt, process_group
from finetune.runtime.ranks.context_group import ContextGroup, StandIn
from finetune.runtime.types import JsonObject, Model

if TYPE_CHECKING:
    import trl
    from datasets import Dataset
    from peft import PeftConfig
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    Shown = Dataset | rows.PackedRows  # prepared rows, as the script sees them

# TRL's names for metrics that are called otherwise in this project.
TRL_NAMES = {"token_accuracy": "mean_token_accuracy"}


class SFTTrainer(JobTrainer):
    """`trl.SFTTrainer`, with results that do not depend on the number of GPUs.

    The arguments are TRL's. Rows are read by TRL's rules and tokenized once per machine; what cannot be kept exactly on
    several GPUs is refused here, with the reason. `seed` alone sets the order of the rows, and a step's loss is the
    mean over the supervised tokens of the whole global batch.

    Args:
        model: a model, or the name or folder of one. With `--finetune training.strategy=shard`, which splits it
            over the GPUs, it must be a name.
        args: `finetune.SFTConfig`, `trl.SFTConfig` or `TrainingArguments`; TRL's defaults if it is None.
        data_collator: not needed if it only pads. One that computes labels is called once per row, and cannot be
            used with packing.
        train_dataset: rows in any format that TRL takes, tokenized or not.
        eval_dataset: held-out rows, or several sets of them by name.
        processing_class: the tokenizer; the model's own if it is None.
        callbacks: as in transformers; they are called on every rank.
        quantization_config: for a model that is given by name, as in TRL.
        peft_config: a `LoraConfig`. A model that has an adapter keeps it.
        formatting_func: takes a row and returns its text, which is then tokenized.
        global_batch_size: rows (or packs) per optimizer step over all GPUs. Accumulation follows from it, so that
            the steps are the same on any number of GPUs, and so does `per_device_train_batch_size` if
            `finetune.SFTConfig` is not given one: the fastest that fits. Without it, a step has
            `per_device_train_batch_size x gradient_accumulation_steps x number of processes` rows, as in TRL; a run
            that is resumed keeps the rows that it was launched with.
        older: arguments of older versions of TRL that Unsloth's examples still use, such as `tokenizer`.

    Raises:
        Refused: arguments that cannot be kept exactly; also a ValueError.
        UserError: the rows, the model or the batch cannot be used.
    """

    @names.script_names()
    def __init__(
        self,
        model: Model | str,
        args: transformers.TrainingArguments | None = None,
        data_collator: rows.Collator | None = None,
        train_dataset: object = None,
        eval_dataset: object = None,
        processing_class: object = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable | None = None,
        callbacks: list[transformers.TrainerCallback] | None = None,
        optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[Optimizer], JsonObject] | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        quantization_config: object = None,
        peft_config: PeftConfig | None = None,
        formatting_func: Callable[..., object] | None = None,
        *,
        global_batch_size: int | None = None,
        **older: Any,
    ) -> None:
        self._ready = False
        self.record = None
        processing_class = older.pop("tokenizer", None) or processing_class
        field = older.get("dataset_text_field")
        given = former.complete_arguments(args, model, older, OVERRIDES)
        reading = former.row_reader(given, model, formatting_func, field)
        refusals.check(
            type(self),
            SFTTrainer,
            given,
            dict(
                args=args,
                train_dataset=train_dataset,
                data_collator=data_collator,
                compute_loss_func=compute_loss_func,
                compute_metrics=compute_metrics,
                preprocess_logits_for_metrics=preprocess_logits_for_metrics,
                formatting_func=formatting_func,
            ),
        )
        splits = {"train": train_dataset, **_by_split(eval_dataset)}
        sources = rows.sources(splits, given, reading)
        transformers.set_seed(given.seed)  # adapters and new embeddings are random, equally on every rank
        loaded, peft_config = backbone.load(model, given, STACK, quantization_config, peft_config, OVERRIDES)
        peft_config = backbone.without_effectless(loaded, former.adapter_to_add(loaded, peft_config))
        refusals.check_model(loaded, peft_config, given)
        layers = self._layer_kernels(backbone.model_stack(loaded, STACK), loaded, given)
        tokenizer, loaded, peft_config = backbone.tokenizer(processing_class, loaded, given, peft_config)

        self.global_batch_size = OVERRIDES.get("training.global_batch_size", global_batch_size)
        self.given = given
        own = None if rows.only_pads(data_collator) else data_collator
        self.preparation = Preparation(args=given, tokenizer=tokenizer, reading=reading, collator=own)
        data = self.preparation.tokenized(sources)
        job = self._assemble(loaded, data, layers)
        trackers.disable_telemetry()
        with scripts.remove_new_folder(Path(str(given.output_dir))):
            super().__init__(
                model=loaded,
                args=training_arguments(given, job.batch, settings.timeout(given)),
                tokenizer=tokenizer,
                stack=job.stack,
                plan=job.plan(),
                layout=job.layout,
                eval_layout=job.eval_layout,
                callbacks=callbacks,
                optimizers=optimizers,
                optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
                peft_config=peft_config,
                recomputation=settings.recomputation(given, loaded, tiled_mlp=OVERRIDES.get("model.tiled_mlp", False)),
                reduces_once=shard.reduces_once(job.config),
                context=job.context,
            )
        if layers.kernels == liger.LIGER:
            liger.install(self.model)
        experts.freeze_biases_of_choice(self.model)
        multimodal.prepare(self.model)
        fused_lora.install(self.model, roomy=not shard.is_requested(job.config))
        grouped_experts.install(self.model)
        weights = settings.weights_as_loaded(self.model)
        config = self._configuration(self.model, job.stack, job.batch)
        self.job = assemble(config, job.stack, self.model, data, **job.parts(master_weights=weights))
        if 0 < self.args.logging_steps < 1:  # a share of the run, as transformers counts it
            self.args.logging_steps = math.ceil(self.args.logging_steps * self.total_steps)
        building.complete_early_stopping(self)
        self._created_with = refusals.snapshot(args, self.args)
        self._ready = True
        self._show_layouts()

    # --- data ---------------------------------------------------------------------------------------------------------

    def _assemble(self, model: Model, data: Data, layers: liger.LayerKernels) -> Job:
        """What the engine calls a run, before an adapter is added to the model."""
        stack, context = backbone.model_stack(model, STACK), self._context()
        batch = settings.batch(self.given, self.global_batch_size, context.size * context.data_ranks)
        config = self._configuration(model, stack, batch)
        refusals.check_shared_rows(config)
        self._check_rows(model, data)
        return assemble(
            config,
            stack,
            model,
            data,
            batch=batch,
            tokenizer=self.preparation.tokenizer,
            layer_kernels=layers,
            master_weights=settings.weights_as_loaded(model),
            pack_eval=self._packs_eval,
            context=context,
        )

    def _take(self, job: Job) -> None:
        """Train as this job says."""
        self.job, self.layout, self.eval_layout, self.plan = job, job.layout, job.eval_layout, job.plan()

    def take_batch(self, batch: Batch) -> None:
        job = self.job
        config = self._configuration(self.model, job.stack, batch)
        self._take(assemble(config, job.stack, self.model, job.data, **job.parts(batch=batch)))

    def _context(self) -> ContextGroup:
        """The ranks that share each row. For a command, one process stands in for all of them.

        Raises:
            UserError: `context_parallel` does not divide the number of processes.
        """
        size, world = settings.context_parallel(self.given), distributed.ranks().world_size
        if size > 1 and world == 1 and scripts.running_script() is not None:
            return StandIn(size=size)
        data_ranks(TrainingConfig(context_parallel=size), world)
        return context_group.create(size, settings.timeout(self.given))

    def _configuration(self, model: Model, stack: Stack, batch: Batch) -> Config:
        is_open = settings.leaves_micro_batch_open(self.given, self.global_batch_size)
        config = settings.configuration(self.given, stack, model, batch, size_is_open=is_open)
        training = replace(config.training, strategy=OVERRIDES.get("training.strategy", None))
        model_config = replace(config.model, tiled_mlp=OVERRIDES.get("model.tiled_mlp", False))
        logging = replace(config.logging, **OVERRIDES.section("logging"))
        return replace(config, model=model_config, training=training, logging=logging)

    def _check_rows(self, model: Model, data: Data) -> None:
        """Check that the model has embeddings and positions for the rows.

        Raises:
            Refused, UserError: it has not.
        """
        for split, found in data.splits.items():
            tokenizer_loading.check_vocabulary(model, self.preparation.tokenizer, data.ledgers[split], split)
            positions.check(model, found, split, "max_length (in SFTConfig)")
            refusals.check_row_length(found, split, backbone.loaded_length(model))

    @staticmethod
    def _layer_kernels(stack: Stack, model: Model, args: trl.SFTConfig) -> liger.LayerKernels:
        """Liger's if the script asks for them, else those of the model as the script loads it.

        Raises:
            Refused: Liger's kernels cannot be used here.
        """
        if not args.use_liger_kernel:
            return liger.LayerKernels(kernels=liger.backend_kernels(stack), reason="the script loads the model")
        if (why := liger.why_not(stack, model.config.model_type)) is not None:
            raise refusals.Refused(f"SFTTrainer: `use_liger_kernel=True`: {why}. Remove it.")
        return liger.LayerKernels(kernels=liger.LIGER, reason="set by use_liger_kernel")

    @property
    def _packs_eval(self) -> bool:
        return self.given.packing if self.given.eval_packing is None else self.given.eval_packing

    def _eval_layouts(self, data: Data) -> Layout | dict[str, Layout] | None:
        """The held-out rows; by name if the user gave several sets."""
        return lay_out_eval(self.job.config, data, self.layout.packs.pack_length if self._packs_eval else None)

    def _show_layouts(self) -> None:
        """`train_dataset` and `eval_dataset` as TRL's users know them: the tokenized rows."""
        self._shown = rows.as_dataset(self.layout)
        held_out = self.eval_layout
        if isinstance(held_out, Mapping):
            self._shown_eval: Shown | dict[str, Shown] | None = {
                name: rows.as_dataset(one) for name, one in held_out.items()
            }
        else:
            self._shown_eval = None if held_out is None else rows.as_dataset(held_out)

    @property
    def train_dataset(self) -> Shown:
        """The tokenized training rows, or packs of them. Rows that are set later, such as those of Unsloth's
        `train_on_responses_only`, replace them in the plan."""
        return self._shown if self._ready else self.layout.rows.dataset

    @train_dataset.setter
    def train_dataset(self, value: object) -> None:
        if not self._ready or value is self._shown:
            return
        data = self.preparation({"train": value})
        self._check_rows(self.model, data)
        kept = {split: one for split, one in self.job.data.splits.items() if split != "train"}
        ledgers = self.job.data.ledgers | data.ledgers
        layout = lay_out_split(self.job.config, data, "train", self.layout.packs.pack_length)
        self._take_rows(replace(data, splits=data.splits | kept, ledgers=ledgers), train=layout)
        self._counts_checked = False
        self._show_layouts()

    @property
    def eval_dataset(self) -> Shown | dict[str, Shown] | None:
        """The tokenized held-out rows, or several sets of them by name."""
        return self._shown_eval if self._ready else batches.eval_datasets(self.eval_layout)

    @eval_dataset.setter
    def eval_dataset(self, value: object) -> None:
        if not self._ready or value is self._shown_eval:
            return
        held_out = {}
        if value is not None:
            data = self.preparation(_by_split(value))
            self._check_rows(self.model, data)
            held_out = data.splits
        data = replace(self.job.data, splits={"train": self.job.data.train} | held_out)
        self._take_rows(data, eval=self._eval_layouts(data))
        self._show_layouts()

    def _take_rows(self, data: Data, **layouts: object) -> None:
        """Train or evaluate on other rows."""
        job = self.job
        parts = job.parts(layouts=replace(job.layouts, **layouts))  # type: ignore[arg-type]
        self._take(assemble(job.config, job.stack, self.model, data, **parts))

    # --- training -----------------------------------------------------------------------------------------------------

    @names.script_names()
    def train(
        self,
        resume_from_checkpoint: bool | str | Path | None = None,
        trial: object = None,
        ignore_keys_for_eval: list[str] | None = None,
        *,
        resume_with_changes: bool = False,
        **kwargs: object,
    ) -> TrainOutput:
        """Train to the end. A signal ends the program after a checkpoint, with exit code 130.

        Args:
            resume_from_checkpoint: True continues from the newest complete checkpoint in `output_dir`, on any number of
                GPUs; or the path of one. Without it, files of an earlier run there are moved to `earlier-run-N`.
            resume_with_changes: allow arguments that affect the result to differ from the checkpoint's.

        Raises:
            UserError: the arguments, the rows or the checkpoint cannot be used.
            RunError: the run cannot go on, such as for lack of memory.
        """
        refusals.check_unchanged(self, self._created_with)
        if trial is not None:
            raise refusals.Refused("hyperparameter search is not supported: it would train one model after another.")
        scripts.answer_trainer(ScriptCommands(self))
        asked = OVERRIDES.get("training.resume_from_checkpoint", resume_from_checkpoint) or False
        training = replace(
            self.job.config.training,
            resume_from_checkpoint=asked if isinstance(asked, bool) else str(asked),
            resume_with_changes=OVERRIDES.get("training.resume_with_changes", resume_with_changes),
        )
        config, self.record = replace(self.job.config, training=training), None
        record = RunRecord(Path(training.output_dir))
        train = functools.partial(super().train, ignore_keys_for_eval=ignore_keys_for_eval)
        door = ScriptRun(self, self._take_checkpoint, train)
        try:
            with interrupt.installed(), process_group.watching(training.ddp_timeout, "ddp_timeout", record.fail):
                outcome = story.run(door, config, record)
        except interrupt.Interrupted:
            raise SystemExit(INTERRUPTED) from None
        except UserError:
            raise
        except Exception as error:
            if (known := known_error(error)) is None:
                raise
            raise known from error
        if outcome.stopped:
            raise SystemExit(INTERRUPTED)
        record.content.update(outcome.done or {})
        self.record = record
        return outcome.output or TrainOutput(self.state.global_step, math.nan, {})

    def _take_checkpoint(self, config: Config, manifest: JsonObject) -> Job:
        """Take this configuration, and the step of a checkpoint: if it was launched on another number of processes, and
        its size follows from that number, as large as there, so that the plan is the checkpoint's.

        Raises:
            UserError: it does not divide over this number of processes.
        """
        job = self.job
        kept = None if self.global_batch_size is not None else settings.resumed_batch(self.given, manifest)
        config = replace(config, training=settings.with_batch(config.training, kept or job.batch))
        batch = resume.resumed_batch(config, manifest, distributed.ranks().world_size)
        taken = assemble(config, job.stack, self.model, job.data, **job.parts(batch=batch))
        self._take(taken.in_order_of(manifest.get("plan")))
        self.set_batch(batch)
        return self.job

    def set_batch(self, batch: Batch) -> None:
        """Divide each step in another way, before the first."""
        super().set_batch(batch)
        self._accept_arguments()

    def _accept_arguments(self) -> None:
        """Take the arguments as they are now for those that the trainer was created with."""
        self._created_with = refusals.snapshot(*(arguments for arguments, _ in self._created_with))

    def set_arguments(self, **changed: object) -> None:
        for name, value in changed.items():
            setattr(self.args, name, value)
        self._accept_arguments()

    # --- evaluation, saving -------------------------------------------------------------------------------------------

    @names.script_names()
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Metrics over the held-out rows or those of another dataset, which is tokenized like them: the loss per
        supervised token, exact on any number of GPUs, with TRL's names for accuracy and entropy.

        Raises:
            Refused: the rows cannot be used.
            UserError: there are no held-out rows.
        """
        if eval_dataset is None and self.eval_layout is None:
            raise UserError("evaluate() needs held-out rows: give SFTTrainer an `eval_dataset`, or pass one here.")
        if eval_dataset is not None and not isinstance(eval_dataset, str | Layout):
            if not (isinstance(eval_dataset, Mapping) and all(isinstance(x, Layout) for x in eval_dataset.values())):
                data = self.preparation(_by_split(eval_dataset))
                self._check_rows(self.model, data)
                eval_dataset = self._eval_layouts(data)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def evaluate_layout(self, layout: Layout, prefix: str) -> dict[str, float]:
        started = time.time()
        metrics = super().evaluate_layout(layout, prefix)
        for ours, theirs in TRL_NAMES.items():
            if f"{prefix}_{ours}" in metrics:
                metrics[f"{prefix}_{theirs}"] = metrics[f"{prefix}_{ours}"]
        size = self.args.per_device_eval_batch_size * self.context.data_ranks
        return metrics | speed_metrics(prefix, started, len(layout), math.ceil(len(layout) / size))

    def predict(self, *args: object, **kwargs: object) -> NoReturn:
        """Not supported: evaluation does not build the logits that it would return."""
        raise refusals.Refused(
            "predict() returns the logits of every token, which this trainer does not build. Use evaluate() for the "
            "loss, or trainer.model.generate() for answers."
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model or adapter and the tokenizer, from rank 0; the files appear when they are complete. Every rank
        calls it. After training, weights that are saved into the run's `output_dir` are `final_files` of run.json."""
        if _internal_call:
            super().save_model(output_dir, _internal_call=True)
            return
        folder = Path(output_dir or self.args.output_dir)
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
        sums = final_model.save_final(self, folder)
        record = self.record
        if record is not None and record.path.parent.resolve() == folder.resolve():
            weights = {name: one for name, one in sums.items() if name.endswith(".safetensors")}
            record.try_update(final_files=weights)  # the script may write the other files again
            if self.args.should_save:
                card.try_write_of_run(record.path.parent, record.content)


def _by_split(eval_dataset: object) -> dict[str, object]:
    """The held-out datasets by the name of their split: "eval", or "eval_NAME" for each of a mapping."""
    if eval_dataset is None:
        return {}
    if isinstance(eval_dataset, Mapping):
        return {f"eval_{name}": one for name, one in eval_dataset.items()}
    return {"eval": eval_dataset}
