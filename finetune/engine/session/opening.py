"""Opens a run, for train, the dry run, the benchmarks and parity."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from finetune.config import Batch, Config, data_ranks
from finetune.config.data_sources import evaluation_sources, training_sources
from finetune.config.rules import needs_transformers
from finetune.data import sources
from finetune.data.templates.chat_templates import load_template
from finetune.engine import invariants
from finetune.engine.checkpoint import output_folder, resume
from finetune.engine.preflight import config_checks, model_files
from finetune.engine.record import RunRecord
from finetune.runtime import bootstrap, files, startup, user_code
from finetune.runtime.ranks import activity, context_group, distributed, multinode, process_group
from finetune.runtime.ranks.context_group import ContextGroup, StandIn

if TYPE_CHECKING:
    from finetune.engine.job import Job
    from finetune.runtime.bootstrap import Stack


def check_present(config: Config) -> None:
    """Check that the model's files, the data files and the optimizer's package exist, before any heavy import.

    Raises:
        UserError: one of them is missing or unreadable.
    """
    if config.demo:
        return
    config_checks.check(config)
    check_files(config)


def check_files(config: Config) -> None:
    """Check that the data files exist.

    Raises:
        UserError: one of them is missing or unreadable.
    """
    for origin in (*training_sources(config.data), *evaluation_sources(config.data)):
        if origin.files:
            sources.expand(origin.files)


def resolve_demo(config: Config) -> tuple[Config, ModuleType | None]:
    """The configuration and, for --demo, the demo module, whose model, data and settings are filled in."""
    if not config.demo:
        return config, None
    from finetune.engine import demo

    return demo.configure(config, bootstrap.cache_folder(), distributed.ranks().world_size), demo


def open_session(
    config: Config,
    batch: Batch,
    *,
    demo: ModuleType | None = None,
    without: Collection[str] = (),
    on_failure: Callable[..., None] | None = None,
    before_loading: Callable[[Stack, str], str] | None = None,
    stand_in: bool = False,
) -> Job:
    """Start the backend, prepare the data, join the other ranks and load the model.

    Args:
        demo: as returned by `resolve_demo`.
        without: names of patches to skip, even if they are needed.
        on_failure: called with a message if another rank fails, just before this process exits.
        before_loading: called once the ranks can communicate, before the model is loaded, with how the trained weights
            would be kept (`master_weights.WeightPrecision.kind`); returns how they are kept.
        stand_in: this process stands in for one of the ranks that share each row, to be measured.

    Raises:
        UserError, RunError: with what is wrong and what to do.
    """
    stack = _start_backend(config, without)
    from finetune.engine import job
    from finetune.engine.kernels import liger
    from finetune.engine.model import load_arguments, load_checks, positions, tokenizer_loading
    from finetune.engine.optimizer import master_weights
    from finetune.engine.training import arguments

    named = user_code.configured(config.logging)
    code = [(key, name, user_code.load(key, name, config.config_file)) for key, name in named]
    if demo is not None:
        demo.materialize(bootstrap.cache_folder())
    start_up = startup.current()
    start_up.ended("libraries")
    load_checks.check(config, stack)
    load_checks.check_on_meta_model(config, stack)
    with activity.during("preparing data"):
        tokenizer, data = job.read_rows(config)
    if config.model.chat_template not in (None, "none"):  # so that it is saved with the model; the rows are rendered
        tokenizer.chat_template = load_template(tokenizer, config.model.chat_template)
    start_up.ended("data")
    timeout, shared = config.training.ddp_timeout, config.training.context_parallel
    process_group.start(cpu=stack.device == "cpu", timeout_seconds=timeout, on_failure=on_failure)
    invariants.same_data_and_versions_on_all_ranks(
        {
            "the data's fingerprint": data.fingerprint,
            "the number of training rows": len(data.train),
            "the first and last training row": [data.train[i][0].tolist() for i in (0, -1)],
            "the versions of the libraries": bootstrap.versions(),
        }
    )
    if stand_in and shared > 1:
        context: ContextGroup = StandIn(size=shared)
    else:
        data_ranks(config.training, distributed.ranks().world_size)
        context = context_group.create(shared, timeout)
    start_up.ended("ranks")
    arguments.check_arguments(config, stack, batch)  # after the ranks have met: SFTConfig would have them meet
    weights = master_weights.choose(config, stack, load_arguments.resolve_dtype(config, stack))
    with activity.during("reading the checkpoint"):
        kept = weights.kind if before_loading is None else before_loading(stack, weights.kind)
    if kept != weights.kind:
        weights = master_weights.WeightPrecision(kind=kept, reason="as in the checkpoint")
    config = replace(config, training=replace(config.training, master_weights=kept))
    longest = max(int(rows.lengths.max()) for rows in data.splits.values())
    row_length = config.data.row_length or longest
    if stack.backend == "unsloth":
        row_length = positions.without_scaling(config, row_length, longest)
    with activity.during("loading the model"):
        model = job.load_model(config, stack, row_length)
    for split, rows in data.splits.items():
        tokenizer_loading.check_vocabulary(model, tokenizer, data.ledgers[split], split)
        positions.check(model, rows, "training" if split == "train" else "held-out")
    opened = job.assemble(
        config,
        stack,
        model,
        data,
        batch=batch,
        tokenizer=tokenizer,
        layer_kernels=liger.choose(config, stack, model),
        master_weights=weights,
        context=context,
        user_code=code,
    )
    start_up.ended("model")
    return opened


def _start_backend(config: Config, without: Collection[str]) -> Stack:
    # The transformers backend is the one that is proven on sharded models and shared rows.
    backend, setting = config.model.backend, "model.backend"
    if backend == "auto" and (reason := needs_transformers(config)) is not None:
        backend, setting = "transformers", reason
    folder = model_files.model_folder(str(config.model.model_name_or_path), config.model.revision)
    if folder is not None and distributed.ranks().is_local_main:
        files.read_ahead(folder.glob("*.safetensors"))  # the imports need the processor, the weights the disk
    others = user_code.configured(config.logging) or config.model.trust_remote_code
    with bootstrap.library_imports(), contextlib.nullcontext() if others else bootstrap.without_unused():
        used = (config.training.optim,)
        stack = bootstrap.start(backend, config.logging.log_level, without, setting=setting, optimizers=used)
        multinode.node.connect()
        from finetune.engine.training import trainer  # noqa: F401  imports TRL and PEFT
    return stack


def open_and_compare(
    config: Config,
    batch: Batch,
    demo: ModuleType | None,
    record: RunRecord,
    without: Collection[str],
) -> tuple[Job, resume.StartPoint]:
    """Open the job and find where it starts. Compares everything that must match the checkpoint, and writes nothing.

    Raises:
        UserError, RunError: with what is wrong and what to do; the output folder is unchanged.
    """
    start = resume.StartPoint()

    def choose_start(stack: Stack, weights: str) -> str:
        from finetune.engine.model.load_arguments import resolve_dtype

        nonlocal start
        output_folder.check_shared(Path(config.training.output_dir))
        start = resume.prepare(config, batch, str(resolve_dtype(config, stack)).removeprefix("torch."), weights)
        return start.settings["training.master_weights"]

    job = open_session(config, batch, demo=demo, without=without, on_failure=record.fail, before_loading=choose_start)
    job = job.in_order_of(start.found.manifest.get("plan"))
    return job, resume.confirm(start, config, job.model, job.plan().digest(), total_steps(job))


def total_steps(job: Job) -> int:
    """Optimizer steps of the whole run."""
    return resume.total_steps(job.config, job.plan().steps_per_epoch)
