"""The ledger: the table fits 80 columns with nothing cut, and every reason has an example."""

from __future__ import annotations

import pytest
from rich.console import Console

from finetune.data.ledger import Ledger, examples, table

# Every reason that formats.py and template.py give.
REASONS = (
    "empty", "mask_ambiguous", "missing_field", "no_assistant", "no_label", "not_rendered", "not_text", "over_length",
    "roles_out_of_order", "template_error", "unknown_role", "wrong_type",
)  # fmt: skip


def large_ledger() -> Ledger:
    """Counts of a set of 98 billion tokens, nearly all of them supervised."""
    ledger = Ledger(rows_read=123_456_789, rows_kept=111_222_333, truncated=44_555_666, split=7_888_999)
    ledger.duplicates, ledger.tokens, ledger.supervised_tokens = 1_234_567, 98_765_432_109, 98_700_000_000
    for number, reason in enumerate(REASONS):
        ledger.dropped[reason] = 1_000_000 + number
    return ledger


@pytest.mark.parametrize("soft_wrap", [False, True])  # a run prints it in one way, `finetune prepare` in the other
def test_the_table_fits_80_columns_with_nothing_cut(soft_wrap: bool) -> None:
    one = large_ledger().to_dict()
    layout = {"rows": 6_027_841, "pack_length": 16384, "documents_per_row": 18.45, "packing_efficiency": 0.9991}
    console = Console(width=80, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table({"train": one, "eval": one}, {"train": layout, "eval": layout}), soft_wrap=soft_wrap)
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 80
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert {label: values for label, *values in cells} == {
        label: [value, value]
        for label, value in {
            "rows read": "123,456,789",
            "rows dropped": "12,000,066",
            **{reason: f"{1_000_000 + number:,}" for number, reason in enumerate(REASONS)},
            "documents kept": "111,222,333",
            "rows truncated": "44,555,666",
            "rows split into pieces": "7,888,999",
            "exact duplicates": "1,234,567",
            "tokens": "98,765,432,109",
            "supervised": "98,700,000,000 (100%)",
            "mean length (tokens)": "888.0",
            "packs": "6,027,841",
            "documents per pack": "18.4",
            "packing efficiency": "99.9%",
        }.items()
    }


def test_the_first_row_of_each_reason_is_the_example() -> None:
    ledger = Ledger()
    ledger.drop("r.jsonl", "empty", "r.jsonl:3", "message 2 is empty")
    ledger.drop("r.jsonl", "empty", "r.jsonl:4", "message 1 is empty")
    ledger.drop("r.jsonl", "no_label", "r.jsonl:5", "no token is supervised")
    assert examples({"train": ledger.to_dict()}, {"empty": "set data.keep_empty: true"}) == [
        "train: 2 rows dropped (empty), first r.jsonl:3: message 2 is empty; set data.keep_empty: true",
        "train: 1 row dropped (no_label), first r.jsonl:5: no token is supervised",
    ]
