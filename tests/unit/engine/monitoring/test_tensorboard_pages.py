"""Text pages: what a stranger's row holds is shown as text, and tables stay tables."""

from __future__ import annotations

from html.parser import HTMLParser

import markdown
import pytest

from finetune.engine.monitoring import tensorboard_pages

HOSTILE = [
    "a | b\nc", "<script>alert(1)</script>", "**bold** _it_ `code`", "[x](javascript:1)", "![x](http://h/x.png)",
    "back\\slash | \\| end", "\r\n\r\n# heading", "~~gone~~ <img src=x onerror=1>", "&lt;b&gt; &amp;",
]  # fmt: skip


class Cells(HTMLParser):
    """Text of each cell of a table, and the tags met inside cells."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.cells: list[str] = []
        self.inside: set[str] = set()
        self._open = False

    def handle_starttag(self, name, attributes) -> None:
        if name in ("td", "th"):
            self._open = True
            self.cells.append("")
        elif name == "br":
            self.cells[-1] += "\n"
        elif self._open:
            self.inside.add(name)

    def handle_endtag(self, name) -> None:
        self._open = self._open and name not in ("td", "th")

    def handle_data(self, data) -> None:
        if self._open:
            self.cells[-1] += data


@pytest.mark.parametrize("text", HOSTILE)
def test_a_cell_shows_the_text_itself(text: str) -> None:
    """Rendered by the library that TensorBoard uses."""
    page = tensorboard_pages.table(["prompt", "answer"], [[text, "next"]])
    assert page.count("\n") == 2
    shown = Cells()
    shown.feed(markdown.markdown(page, extensions=["markdown.extensions.tables"]))
    assert shown.inside == set()
    assert shown.cells[2].split() == text.split() and shown.cells[3] == "next"


def test_long_samples_are_cut() -> None:
    page = tensorboard_pages.samples_page([("p" * 5000, "answer", "reference")], "exact match 0 (1 answer)")
    assert "p" * tensorboard_pages.LONGEST_SAMPLE in page and "p" * (tensorboard_pages.LONGEST_SAMPLE + 1) not in page


def ledger(**changes):
    one = {
        "rows_read": 200,
        "rows_kept": 176,
        "dropped": {"no_label": 24},
        "examples": {"no_label": "f.jsonl:7: secret row"},
        "truncated": 4,
        "split": 0,
        "duplicates": 0,
        "tokens": 1000,
        "supervised_tokens": 250,
    }
    return one | changes


def test_the_data_page_counts_what_was_lost() -> None:
    packed = {"pack_length": 512, "rows": 20, "documents_per_row": 8.8, "packing_efficiency": 0.9}
    layouts = {"train": packed, "eval": packed}
    both = {"train": ledger(), "eval": ledger(leaked={"rows": 3, "first": None})}
    page = tensorboard_pages.data_page(both, layouts, include_rows=True)
    for shown in ("no\\_label | 24 | 24 |", "rows truncated | 4 | 4 |", "250 (25%)", "90.0%", "secret row"):
        assert shown in page
    assert "also training rows |  | 3 |" in page
    assert "secret row" not in tensorboard_pages.data_page(both, layouts, include_rows=False)
