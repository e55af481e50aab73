"""The first row of the data as a run sees it: rendered, with the tokens marked that the loss is computed on."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

from finetune.config import Config
from finetune.errors import UserError
from finetune.init.detect import Model, Rows
from finetune.runtime import files
from finetune.runtime.command import console, print_line

LONGEST = 2000  # characters that are shown


def show(config: Config, model: Model, rows: Rows) -> None:
    """Print the row, or what keeps a run from training on it. Without a word if the model or the rows are not on this
    machine."""
    if model.folder is None or not rows.first:
        return
    from finetune.data.prepare import prepare
    from finetune.data.templates.encoder import Encoded, preview
    from finetune.engine.model.tokenizer_loading import load_tokenizer
    from finetune.runtime import bootstrap

    bootstrap.quiet_libraries("error")
    with tempfile.TemporaryDirectory(prefix="init-") as folder:
        file = Path(folder) / ("first.md" if rows.raw else "first.jsonl")  # one document, whatever is in it
        shown = (
            [str(row["text"])[: 10 * LONGEST] for row in rows.first[:1]]
            if rows.raw
            else [json.dumps(row, default=str) for row in rows.first]
        )
        files.write_text(file, "\n".join(shown))
        data = replace(config.data, train_file=str(file), eval_fraction=0.0, cache_dir=folder, num_proc=1)
        try:
            tokenizer = load_tokenizer(replace(config, model=replace(config.model, model_name_or_path=model.folder)))
            ids, labels = prepare(replace(config, data=data), tokenizer).train[0]
        except UserError as error:
            print_line(
                f"warning: these rows cannot be trained yet: {str(error).replace(str(file), rows.name)}", style="yellow"
            )
            return
        text = preview(Encoded(input_ids=ids, labels=labels), tokenizer, color=console().is_terminal)
    print_line("The first row; supervised tokens are marked:")
    print_line(text if len(text) <= LONGEST else text[:LONGEST] + " ...")
