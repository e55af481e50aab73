"""`finetune prepare`: tokenizes, masks and packs the data ahead of time, and prints a summary. Needs no GPU."""

from __future__ import annotations

import time
from pathlib import Path

from finetune.config import Config, resolve_batch
from finetune.runtime.command import DONE, console, print_line, run_command

PURPOSE = (
    "Tokenize, mask and pack the data of a configuration ahead of time, and print a summary of the rows. Needs no GPU."
    " Exit code 0: done, 1: failed, 2: bad input."
)


def main(argv: list[str] | None = None) -> int:
    """Fill the data cache of a configuration. Returns the exit code."""
    return run_command("prepare", argv, run, PURPOSE)


def run(config: Config) -> int:
    """Prepare the data and print a summary.

    Raises:
        UserError: the configuration names no data, or the data is unusable.
    """
    from finetune.data import ledger
    from finetune.data.layout import batch_mix, lay_out
    from finetune.data.plan import Plan
    from finetune.data.prepare import prepare
    from finetune.data.template import Encoded, preview
    from finetune.engine import model, session
    from finetune.errors import UserError
    from finetune.measure import strategy
    from finetune.runtime import bootstrap
    from finetune.runtime.files import write_json

    if config.demo:
        raise UserError(
            "prepare needs a model and data, but none are configured. Set model.model_name_or_path and data.train_file."
        )
    if Path(str(config.model.model_name_or_path)).is_dir():  # the tokenizer is enough to prepare data
        session.check_files(config)
    else:
        session.check_present(config)
    bootstrap.quiet_libraries(config.logging.log_level)
    started = time.perf_counter()
    tokenizer = model.load_tokenizer(config)
    data = prepare(config, tokenizer)
    pack_length = config.data.row_length if config.data.packing else None
    splits = {"train": data.train} | ({"eval": data.eval} if data.eval else {})
    keyed = {"seed": config.training.seed, "fingerprint": data.fingerprint}
    layouts = {name: lay_out(rows, pack_length, **keyed) for name, rows in splits.items()}
    shapes = {name: layout.to_dict() for name, layout in layouts.items()}
    packed = layouts["train"]
    world = strategy.largest_world(config, strategy.visible_gpus())
    plan = Plan(
        costs=packed.tokens,
        label_tokens=packed.label_tokens,
        global_batch_size=resolve_batch(config.training, world, config.data).global_batch_size,
        **keyed,
        lengths=packed.padded_lengths,
        group_by_length=config.training.train_sampling_strategy == "group_by_length",
    )
    mix = batch_mix(packed, plan)

    print_line(f"Rows: {data.format}")
    print_line(ledger.table(data.ledgers, shapes))
    if (table := ledger.sources_table(data.ledgers)) is not None:
        print_line(table)
    for sentence in [*ledger.notes(data.ledgers), *ledger.examples(data.ledgers)]:
        print_line(sentence)
    print_line("The first row; supervised tokens are marked:")
    ids, labels = data.train[0]
    print_line(preview(Encoded(input_ids=ids, labels=labels), tokenizer, color=console().is_terminal))
    seconds = time.perf_counter() - started
    print_line(f"{'Found in' if data.cached else 'Written to'} the cache: {data.folder} ({seconds:.1f} s)")
    if config.json:
        ledgers = {name: data.ledgers[name] | {"layout": shapes[name]} for name in splits}
        write_json(
            config.json,
            {"fingerprint": data.fingerprint, "cached": data.cached, "folder": data.folder, "format": data.format}
            | {"ledger": ledgers, "batch_mix": mix, "seconds": seconds},
        )
    return DONE


if __name__ == "__main__":
    raise SystemExit(main())
