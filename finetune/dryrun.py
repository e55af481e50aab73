"""`--dry-run`: would the real run work? The same code on one device, the longest rows first, and nothing kept."""

from __future__ import annotations

import math
import shlex
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from finetune import bootstrap, distributed, keeping
from finetune.config import Batch, Config, resolve_batch
from finetune.errors import RunError, UserError
from finetune.record import write_json
from finetune.verb import DONE, FAILED, console

STEPS = 5  # optimiser steps: the first compiles, the others are measured


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a dry run found. `reason` is None for go."""

    go: bool
    reason: str | None
    measured: dict[str, Any]


def run(config: Config) -> int:
    """Try, report, and leave nothing behind. Returns 0 for go, 1 for no-go.

    Raises:
        UserError: the configuration or the data are wrong (exit code 2).
    """
    if distributed.ranks().world_size > 1:
        raise UserError(
            f"--dry-run tries one device and was launched on {distributed.ranks().world_size} processes. Start it with "
            "`python -m finetune.train --dry-run ...`; it prints the launch line for the real run."
        )
    from finetune.train import checkpoint_bytes, introduce, with_demo

    config, demo = with_demo(config)
    world, real = intended_batch(config)
    output_dir = Path(config.training.output_dir)
    resuming = bool(config.training.resume_from_checkpoint)
    keeping.check_output(output_dir, resuming=resuming, overwrite=config.training.overwrite_output_dir)
    stack = bootstrap.start(config.model.backend, config.logging.log_level)

    from finetune.job import open_job

    if demo:
        demo.materialise(bootstrap.cache_folder())
    try:
        job = open_job(config, real, stack)
        introduce(job, keeping.Found(path=None, skipped=()))
        keeping.check_space(output_dir, checkpoint_bytes(job.model), "a checkpoint and the final model")
        show_example(job)
        # Beside the real output folder, so that the real disk is tried.
        with tempfile.TemporaryDirectory(prefix=".dry-run-", dir=_existing(output_dir)) as folder:
            outcome = try_out(job, Path(folder))
    except RunError as error:
        outcome = Outcome(go=False, reason=str(error), measured={})
    report(config, outcome, launch_line(world))
    return DONE if outcome.go else FAILED


def try_out(job: Any, folder: Path) -> Outcome:
    """A few optimiser steps on the longest rows, then save, spoil, reload and compare.

    Raises:
        RunError: out of memory, a loss that is not finite, no disk space.
    """
    from finetune.train import build_trainer, out_of_memory

    longest = job.layout.take(job.layout.largest_first()[: STEPS * job.batch.per_device])
    steps = min(STEPS, math.ceil(len(longest) / job.batch.per_device))
    training = replace(
        job.config.training,
        output_dir=str(folder),
        max_steps=steps,
        save_steps=0,
        eval_steps=0,
        resume_from_checkpoint=False,
    )
    trial = replace(
        job,
        config=replace(job.config, training=training, logging=replace(job.config.logging, logging_steps=1)),
        batch=Batch(per_device=job.batch.per_device, accumulation=1, global_size=job.batch.per_device),
        layout=longest,
    )
    trainer, telling, _ = build_trainer(trial, folder)
    with out_of_memory(trial):
        try:
            trainer.train()
            if job.data.eval:
                trainer.evaluate()
        finally:
            telling.close()
    measured = telling.results() | {"longest_row_tokens": int(longest.tokens[0])}
    check_reload(trainer, folder / "saved")
    return Outcome(go=True, reason=None, measured=measured)


def check_reload(trainer: Any, folder: Path) -> None:
    """Save the trained weights, spoil them in memory, load them from the disk, and compare with what they were.

    Raises:
        RunError: they differ, so a saved model would not be the trained one.
    """
    import torch

    model = trainer.model
    with keeping.no_space(folder.parent, "the trained weights"):
        trainer.save_model(str(folder))
    trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    trainer._load_from_checkpoint(str(folder))
    parameters = dict(model.named_parameters())
    bad = [name for name, value in trained.items() if not torch.equal(parameters[name].detach(), value)]
    if bad:
        raise RunError(
            f"After saving and loading, {len(bad)} of {len(trained)} trained tensors differ (the first is {bad[0]}): "
            "a saved model would not be the one that was trained. Please report this with the output of `finetune "
            "doctor`."
        )


def show_example(job: Any) -> None:
    """One row, what is learnt of it marked."""
    from finetune.data.template import Encoded, preview

    ids, labels = job.data.train[0]
    console().print("One training row; what is learnt is marked:", highlight=False)
    example = Encoded(input_ids=ids, labels=labels)
    console().print(preview(example, job.tokenizer, color=console().is_terminal), soft_wrap=True)


def report(config: Config, outcome: Outcome, line: str) -> None:
    """Say go or no-go, with what was measured and the launch line for the real run."""
    measured = outcome.measured
    if outcome.go:
        shown = Table(title="Dry run", title_justify="left", show_header=False)
        shown.add_row("longest row", f"{measured['longest_row_tokens']:,} tokens")
        shown.add_row("peak memory", f"{measured['peak_memory_gib'][0]:.2f} GiB")
        if measured["tokens_per_second_per_gpu"]:
            shown.add_row("speed", f"{measured['tokens_per_second_per_gpu']:,.0f} tokens/s per device")
        shown.add_row("loss of each step", ", ".join(f"{loss:.4f}" for loss in measured["losses"]))
        shown.add_row("saved and reloaded", "equal")
        console().print(shown)
        console().print("GO. Nothing was kept. Start the real run with:", style="green", highlight=False)
        console().print(f"  {line}", soft_wrap=True, highlight=False, markup=False)
    else:
        console().print(f"NO-GO: {outcome.reason}", style="red", soft_wrap=True, highlight=False, markup=False)
    if config.json:
        verdict = {"go": outcome.go, "reason": outcome.reason, "launch": line, **measured}
        write_json(config.json, verdict)


def intended_batch(config: Config) -> tuple[int, Batch]:
    """How many ranks the real run would have here, and its batch: all GPUs, or the most that hold the global batch."""
    for world in range(max(visible_gpus(), 1), 1, -1):
        try:
            return world, resolve_batch(config.training, world, config.data)
        except UserError:
            continue
    return 1, resolve_batch(config.training, 1, config.data)


def launch_line(world: int) -> str:
    """The `accelerate launch` command of the real run on `world` devices, with the arguments that were given."""
    import torch

    given = [argument for argument in sys.argv[1:] if argument not in ("--dry-run", "--dry_run")]
    if "--json" in given:
        place = given.index("--json")
        given = given[:place] + given[place + 2 :]
    given = [argument for argument in given if not argument.startswith("--json=")]
    devices = [*(["--multi_gpu"] if world > 1 else []), "--num_processes", str(world)]
    if not torch.cuda.is_available():
        devices.insert(0, "--cpu")
    return shlex.join(["accelerate", "launch", *devices, "-m", "finetune.train", *given])


def visible_gpus() -> int:
    """GPUs of this machine, those hidden from this one-device trial included."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except Exception:  # no driver, or no pynvml: what torch sees is all there is
        import torch

        return torch.cuda.device_count()


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder
