"""How long a run is, and how often it logs, evaluates and saves: fitted to the number of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from finetune.init.detect import Rows
from finetune.text import counted

FEWEST_STEPS = 60  # of a run that is to learn something, if MOST_EPOCHS allow it
MOST_EPOCHS = 5
BATCH, SMALLEST_BATCH = 16, 4
STEPS_PER_EPOCH = 16  # of few rows, by a smaller batch


@dataclass(frozen=True, kw_only=True)
class Length:
    """Settings of a run, and the sentence that says what they make of the rows. The defaults are those of many rows."""

    global_batch_size: int = BATCH
    epochs: int = 1
    logging_steps: int = 10
    eval_steps: int = 100
    save_steps: int = 500
    sentence: str = ""


def fitted(rows: Rows) -> Length:
    """The settings for these rows: at least 60 steps if 5 epochs allow it, 20 log entries, 5 evaluations and a
    checkpoint half-way."""
    if rows.count is None:
        return Length()
    trained = max(round(rows.count * (1 - rows.eval_fraction)), 1)
    batch = BATCH
    while batch > SMALLEST_BATCH and trained < STEPS_PER_EPOCH * batch:
        batch //= 2
    per_epoch = math.ceil(trained / batch)
    epochs = min(math.ceil(FEWEST_STEPS / per_epoch), MOST_EPOCHS)
    steps = epochs * per_epoch
    many = Length()
    found = Length(
        global_batch_size=batch,
        epochs=epochs,
        logging_steps=min(max(steps // 20, 1), many.logging_steps),
        eval_steps=min(math.ceil(steps / 5), many.eval_steps),
        save_steps=min(math.ceil(steps / 2), many.save_steps),
    )
    held_out = rows.count - trained
    about = "" if held_out == 0 and not rows.raw else "about "
    text = f"{counted(epochs, 'epoch')} of {about}{counted(per_epoch, 'step')}, {counted(batch, 'row')} each"
    pieces = "documents, in about {} of 2,048 tokens" if rows.raw else "{}"
    what = pieces.format(counted(rows.count, "piece" if rows.raw else "row"))
    return replace(found, sentence=f"{what}: {text}")
