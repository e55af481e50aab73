"""`finetune prepare`: tokenizes, masks and packs the data ahead of time, and prints a summary. Needs no GPU."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.config import Config
from finetune.runtime import files, scripts
from finetune.runtime.command import DONE, console, load_config, print_line, run_with_options
from finetune.runtime.options import Options, count
from finetune.runtime.types import ScriptTrainer, Tokenizer
from finetune.text import counted

if TYPE_CHECKING:
    from finetune.data.layout import Layout
    from finetune.data.plan import Plan
    from finetune.data.prepare import Data

PURPOSE = "Tokenize, mask and pack the data of a configuration ahead of time, and print a summary. Needs no GPU."
NOTES = "Exit code 0: done, 1: failed, 2: bad input."


def main(argv: list[str] | None = None) -> int:
    """Fill the data cache of a configuration or a script. Returns the exit code."""
    return run_with_options(own_options().format_help(), argv, _run, takes_script=True)


def own_options() -> Options:
    """The options of this command."""
    options = Options("prepare", PURPOSE, notes=NOTES, usage="[--step N] [--json PATH]", script=True)
    options.add("--step", count, "N", "also print the rows of step N (of a run: give its run.yaml)")
    return options


def _run(argv: list[str]) -> int:
    options, rest, script = own_options().split_script(argv)
    if not script:
        return run(load_config(rest, command="prepare"), options.json, options.step)
    began = time.perf_counter()

    def from_trainer(trainer: ScriptTrainer) -> int:
        job = trainer.job
        held_out = job.eval_layout or {}
        named = held_out if isinstance(held_out, Mapping) else {"": held_out}
        layouts = {f"eval_{name}" if name else "eval": layout for name, layout in named.items()}
        show(job.data, {"train": job.layout, **layouts}, job.tokenizer, began, options.json)
        print_line(f"Packs: {job.layouts.proof or f'none, {job.unpacked_because}'}")
        if options.step is not None:
            show_step(options.step, job.plan(), job.layout, job.tokenizer)
        return DONE

    return scripts.run(script, scripts.Answer(trainer=from_trainer))


def run(config: Config, json: Path | None = None, step: int | None = None) -> int:
    """Prepare the data and print a summary.

    Args:
        json: where the result goes.
        step: whose rows are printed as well, from 1.

    Raises:
        UserError: the configuration names no data, or the data is unusable.
    """
    from finetune.engine.job import lay_out_split, plan_of, read_rows
    from finetune.engine.session import opening
    from finetune.errors import UserError
    from finetune.runtime import bootstrap

    if config.demo:
        raise UserError(
            "prepare needs your own model and data. Set model.model_name_or_path and data.train_file, not --demo."
        )
    if Path(str(config.model.model_name_or_path)).is_dir():  # the tokenizer is enough to prepare data
        opening.check_files(config)
    else:
        opening.check_present(config)
    if step is not None and config.training.global_batch_size is None:
        raise UserError(
            "--step needs the number of rows of a step: give the run.yaml of the run (finetune prepare RUN/run.yaml "
            "--step N), or set training.global_batch_size."
        )
    bootstrap.quiet_libraries(config.logging.log_level)
    began = time.perf_counter()
    tokenizer, data = read_rows(config)
    padded = not config.data.packing or (step and _padded(Path(config.training.output_dir) / "run.json"))
    pack_length = None if padded else config.data.row_length
    layouts = {name: lay_out_split(config, data, name, pack_length) for name in data.splits}
    show(data, layouts, tokenizer, began, json)
    if pack_length is not None:
        print_line(
            "Packs are laid out again as padded rows if a run finds that its model lets documents reach each other"
        )
    if step is not None and (rows := config.training.global_batch_size) is not None:
        show_step(step, plan_of(config, data, layouts["train"], rows), layouts["train"], tokenizer)
    return DONE


def _padded(record: Path) -> bool:
    """Whether a run has padded the rows that it was to pack."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return files.read_json(record)["packs"]["packed"] is False
    return False


def show(data: Data, layouts: Mapping[str, Layout], tokenizer: Tokenizer, began: float, json: Path | None) -> None:
    """Print a summary of prepared rows, and write it to `json`.

    Args:
        layouts: by split.
        began: when their preparation began, as `time.perf_counter`.
    """
    from finetune.data import ledger
    from finetune.data.prepare import REMEDIES
    from finetune.data.templates.encoder import Encoded, preview
    from finetune.runtime.files import write_json

    shapes = {name: layout.to_dict() for name, layout in layouts.items()}
    print_line(f"Rows: {data.format}")
    print_line(ledger.table(data.ledgers, shapes))
    if (table := ledger.sources_table(data.ledgers)) is not None:
        print_line(table)
    for sentence in [*ledger.notes(data.ledgers), *ledger.examples(data.ledgers, REMEDIES)]:
        print_line(sentence)
    print_line("The first row; supervised tokens are marked:")
    ids, labels = data.train[0]
    print_line(preview(Encoded(input_ids=ids, labels=labels), tokenizer, color=console().is_terminal))
    seconds = time.perf_counter() - began
    print_line(f"{'Found in' if data.cached else 'Written to'} the cache: {data.folder} ({seconds:.1f} s)")
    if json:
        ledgers = {name: data.ledgers[name] | {"layout": shapes[name]} for name in layouts}
        write_json(
            json,
            {"fingerprint": data.fingerprint, "cached": data.cached, "folder": data.folder, "format": data.format}
            | {"ledger": ledgers, "seconds": seconds},
        )


def show_step(step: int, plan: Plan, layout: Layout, tokenizer: Tokenizer) -> None:
    """Print the documents of a step of the run, which counts from 1."""
    from finetune.data.templates.encoder import Encoded, preview

    epoch, place = divmod(step - 1, plan.steps_per_epoch)
    documents = [one for row in plan.step_rows(epoch, place) for one in layout[int(row)]]
    print_line(f"Step {step}, in epoch {epoch + 1}: {counted(len(documents), 'document')}")
    for ids, labels in documents:
        print_line(preview(Encoded(input_ids=ids, labels=labels), tokenizer, color=console().is_terminal))


if __name__ == "__main__":
    raise SystemExit(main())
