"""What became of the rows, by the ledger of run.json."""

from __future__ import annotations

from collections.abc import Sequence

from finetune.review.finding import Finding, percent
from finetune.review.run import Run
from finetune.review.values import count, mapping, text
from finetune.runtime.types import JsonObject
from finetune.text import counted

DROPPED = 0.05  # of the rows read
TRUNCATED = 0.10


def leak(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """A row of the evaluation is also in the training data (counted by token ids while the data is prepared), by
    definition."""
    rows = count(run.at("ledger.eval.leaked.rows"))
    if not rows:
        return None
    read = count(run.at("ledger.eval.rows_kept")) or count(run.at("ledger.eval.rows_read"))
    first = mapping(run.at("ledger.eval.leaked.first"))
    file, line = text(first.get("file")), count(first.get("line"))
    where = f"; the first is {file}" + (f", line {line}" if line is not None else "") if file else ""
    of = f" of {read:,}" if read else ""
    return Finding(
        rule="leak",
        headline="Evaluation rows are in the training data",
        figures=(
            counted(rows, f"{of} evaluation row".strip()),
            percent(rows / read) if read else "number of rows not recorded",
        ),
        evidence=f"{rows:,}{of} evaluation rows have the same tokens as a training row (threshold 1){where}.",
        advice="remove them from data.train_file, or set data.eval_fraction instead of data.eval_file",
        gain="an evaluation loss that measures generalization" + (f" on all {read:,} rows" if read else ""),
        charts=("eval_loss",),
    )


def rows_lost(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """At least 5 % of the rows are dropped or 10 % truncated, in any split. House rule."""
    found = [one for split in ("train", "eval") for one in _losses_of(run, split)]
    if not found:
        return None
    share, limit, sentence, advice = max(found)
    return Finding(
        rule="rows-lost",
        headline="Rows of the data are dropped or cut",
        figures=(f"{percent(share)} of the rows", f"threshold {percent(limit)}"),
        evidence=" ".join(one[2] for one in found),
        advice=advice,
        gain=f"{percent(share)} of the rows in full",
        charts=("document_length",),
    )


def _losses_of(run: Run, split: str) -> list[tuple[float, float, str, str]]:
    """(share, threshold, evidence, advice) of what is lost of a split beyond the thresholds."""
    ledger: JsonObject = mapping(run.at(f"ledger.{split}"))
    read = count(ledger.get("rows_read"))
    if not read:
        return []
    found = []
    reasons = {text(name) or "?": count(rows) or 0 for name, rows in mapping(ledger.get("dropped")).items()}
    dropped = sum(reasons.values())
    if dropped >= DROPPED * read:
        reason = max(reasons, key=lambda name: reasons[name])
        # Where, not how: details may quote the row, and reviews leave the machine.
        example = (text(mapping(ledger.get("examples")).get(reason)) or "").partition(": ")[0]
        first = f", such as {example}" if example else ""
        sentence = (
            f"{split}: {dropped:,} of {read:,} rows ({percent(dropped / read)}, threshold {percent(DROPPED)}) dropped, "
            f"mostly for `{reason}`{first}."
        )
        advice = (
            _LONGER if "length" in reason or "long" in reason else "run `finetune prepare`, which shows each reason"
        )
        found.append((dropped / read, DROPPED, sentence, advice))
    truncated = count(ledger.get("truncated")) or 0
    if truncated >= TRUNCATED * read:
        limit = count(run.at("config.data.max_length"))
        sentence = (
            f"{split}: {truncated:,} of {read:,} rows ({percent(truncated / read)}, threshold {percent(TRUNCATED)}) "
            f"truncated at {limit or 'an unrecorded number of'} tokens."
        )
        longer = f"data.max_length: {2 * limit}" if limit else _LONGER
        found.append((truncated / read, TRUNCATED, sentence, f"{longer}, or data.over_length: split"))
    return found


_LONGER = "a larger data.max_length"
