"""What became of the rows, by the ledger of run.json."""

from __future__ import annotations

from collections.abc import Sequence

from finetune.review.finding import Explanation, Finding, percent
from finetune.review.run import Run
from finetune.review.values import count, mapping, number, text
from finetune.runtime.types import JsonObject
from finetune.text import counted

DROPPED = 0.05  # of the rows read
TRUNCATED = 0.10
MIX = 1.5  # spread of the steps' mean document length, by that of a random order; chance stays below 1.2


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
        headline="Rows of the data are lost",
        figures=(f"{percent(share)} of the rows", f"threshold {percent(limit)}"),
        evidence=" ".join(one[2] for one in found),
        advice=advice,
        gain=f"{percent(share)} more rows",
        charts=("document_length",),
    )


def similar_steps(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """The mean document length varies over steps at least 1.5 times as much as in random order: steps are not random
    samples. House rule; on GSM8K, steps of one length cost 1.4 % of held-out loss (docs/learning.md)."""
    found, random = (number(run.at(f"batch_mix.{name}")) for name in ("sd_of_step_mean_length", "sd_random_order"))
    if found is None or not random or found < MIX * random:
        return None
    documents = number(run.at("batch_mix.documents_per_step"))
    grouped = text(run.at("config.training.train_sampling_strategy")) == "group_by_length"
    return Finding(
        rule="similar-steps",
        headline="Steps hold documents of similar length",
        figures=(f"spread {found / random:.1f} times that of a random order", f"threshold {MIX:.1f}"),
        evidence=f"Over steps, the mean document length has a standard deviation of {found:.1f} tokens; in random "
        f"order it is {random:.1f}" + (f", with {documents:.0f} documents per step." if documents else "."),
        advice="training.train_sampling_strategy: random" if grouped else "packing in random order, as by default",
        gain=f"a spread of {random:.1f} tokens, and a lower held-out loss",
        confidence="medium",
        charts=("loss", "eval_loss"),
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


EXPLANATIONS = {
    "leak": Explanation(
        question="Are rows of the evaluation also in the training data?",
        sees="The evaluation loss is lower than it should be, and falls as long as the training loss does.",
        means="The model has trained on the very rows it is then examined on. The figure measures memory, not what the "
        "model does with new rows.",
        measured="While the data is prepared, the token ids of every held-out row are compared with all training rows. "
        "One equal row is enough.",
        example="5 of 21 evaluation rows have the same tokens as a training row (threshold 1); the first is "
        "eval.jsonl, line 17.",
        source="tests/review/fixtures/leak, two CPU ranks",
        remedy="Remove these rows from the training file, or set data.eval_fraction instead of data.eval_file: it "
        "splits without overlap.",
        brings="An evaluation loss that says how the model does on rows that it has not seen.",
    ),
    "rows-lost": Explanation(
        question="How many of the rows were dropped or cut?",
        sees="The run trains on fewer rows than the file has, or on their beginnings only.",
        means="A row without an answer to train on, with an unknown role or with an unsuitable shape is dropped; one "
        "longer than data.max_length is cut, and what is cut is often the answer.",
        measured=f"The ledger of `run.json` counts each reason. Dropped rows count from {percent(DROPPED)} of the rows "
        f"read on, truncated ones from {percent(TRUNCATED)}, in any split.",
        example="train: 67 of 400 rows (17 %, threshold 5.0 %) dropped, mostly for `no_assistant`, such as "
        "train.jsonl:1.",
        source="tests/review/fixtures/rows-lost, two CPU ranks",
        remedy="`finetune prepare` prints each reason with the first row. Usual causes are other column names "
        "(data.columns) and a data.max_length that is too small (data.over_length: split keeps the rest of long rows).",
        brings="That share more of the rows to learn from.",
    ),
    "similar-steps": Explanation(
        question="Is each step a random sample of the rows?",
        sees="The training loss jumps up and down more than usual.",
        means="If rows are sorted or grouped by length, one step holds only short rows and the next only long ones. "
        "Short and long rows differ in content, so the model is pulled back and forth.",
        measured="The mean length of the documents of each step varies over steps. The rule compares that spread with "
        f"the one a random order would have; from {MIX:.1f} times on, steps are not random samples.",
        example="Over steps, the mean document length has a standard deviation of 29.5 tokens; in random order it is "
        "8.1, with 16 documents per step.",
        source="tests/review/fixtures/similar-steps, two CPU ranks",
        remedy="Set training.train_sampling_strategy: random, or data.packing: true, which has no padding to save by "
        "grouping.",
        brings="A lower held-out loss: grouping by length cost 1.4 % of it on GSM8K.",
    ),
}
