"""What TensorBoard shows beside the curves: the order of the charts, and text pages."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from finetune.data import ledger
from finetune.runtime.tags import BY_NAME, PHASES, tag
from finetune.runtime.types import JsonObject

LONGEST_SAMPLE = 2000  # characters of a prompt, an answer or a reference


def layout() -> dict[str, dict[str, list[object]]]:
    """The charts of the custom-scalars tab, in the order of the questions that a user asks: what TIME SERIES, which has
    a chart per figure, does not show together.

    The same for every run and world size, or TensorBoard would show charts twice when runs are compared.
    """

    def lines(*names: str) -> list[object]:
        # A tag is a regular expression here.
        tags = [re.escape(BY_NAME[name].tag).replace(r"\{n\}", r"\d+").replace(r"\{name\}", ".+") for name in names]
        return ["Multiline", [one + "$" for one in tags]]

    return {
        "1 Is it learning?": {
            "training loss [nats per supervised token]": lines("loss"),
            "held-out loss [nats per supervised token]": lines("eval_loss"),
            "answers to held-out prompts": lines("eval_exact_match", "eval_metric"),
            "token accuracy [0-1]": lines("token_accuracy", "eval_token_accuracy"),
            "entropy [nats]": lines("entropy", "eval_entropy"),
        },
        "2 Is it fast?": {
            "tokens per second per device": lines("tokens_per_gpu"),
            "where a step goes [s]": lines(*PHASES),
        },
        "3 Which rank holds the others back?": {
            "own work: median, fastest, slowest rank [s]": [
                "Margin",
                [tag("own_work"), tag("own_work_fastest"), tag("own_work_slowest")],  # plain tags here
            ],
            "own work of each rank [s]": lines("own_work_of_rank"),
        },
        "4 Memory": {
            "peak of each rank [GiB]": lines("peak_of_rank"),
            "fullest GPU [0-1]": lines("fullest"),
        },
        "5 GPUs": {
            "utilization [0-1]": lines("gpu_utilization"),
            "SM clock [MHz]": lines("gpu_clock"),
            "power [W]": lines("gpu_power"),
            "temperature [C]": lines("gpu_temperature"),
            "throttled [0-1]": lines("gpu_throttled"),
        },
    }


def cell(value: object) -> str:
    """A value as one cell of a Markdown table: nothing in it is markup, and it stays on one line."""
    text = str(value)
    text = text if len(text) <= LONGEST_SAMPLE else text[:LONGEST_SAMPLE] + " ..."
    text = html.escape(text, quote=False)
    text = re.sub(r"([\\`*_\[\]|#!])", r"\\\1", text)
    return re.sub(r"\r\n?|\n", "<br>", text)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table. Cells are escaped."""
    lines = [" | ".join(header), "|".join(["---"] * len(header))]
    lines += [" | ".join(cell(value) for value in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def data_page(ledgers: dict[str, JsonObject], layouts: dict[str, JsonObject], *, include_rows: bool) -> str:
    """What happened to the rows of each split, as on the terminal.

    Args:
        include_rows: quote the first row dropped for each reason.
    """
    page = table(["", *ledgers], ledger.rows(ledgers, layouts))
    page += "".join(f"\n\n{cell(note)}" for note in ledger.notes(ledgers))
    examples = [
        [name, reason, example] for name, one in ledgers.items() for reason, example in sorted(one["examples"].items())
    ]
    if include_rows and examples:
        page += "\n\n" + table(["split", "reason", "first row dropped for it"], examples)
    return page


def samples_page(rows: Iterable[tuple[str, str, str]], scores: str) -> str:
    """(prompt, the model's answer, reference) of each sample, below their scores in words."""
    return f"{cell(scores)}\n\n{table(['prompt', 'answer', 'reference'], rows)}"
