"""Text pages: what a stranger's row holds is shown as text, and tables stay tables."""

from __future__ import annotations

from html.parser import HTMLParser

import markdown
import numpy as np
import pytest

from finetune.engine.monitoring import tensorboard_pages
from finetune.engine.monitoring.monitor import RankRecord

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
        "duplicates": 0,
        "tokens": 1000,
        "supervised_tokens": 250,
    }
    return one | changes


def test_the_data_page_counts_what_was_lost() -> None:
    layouts = {"train": {"packing_efficiency": 0.9}, "eval": {"packing_efficiency": None}}
    both = {"train": ledger(), "eval": ledger(leaked={"rows": 3, "first": None})}
    page = tensorboard_pages.data_page(both, layouts, include_rows=True)
    assert "24 (12%)" in page.replace("\\", "") and "4 (2%)" in page and "10.0%" in page and "secret row" in page
    assert "also in the training rows" in page
    assert "secret row" not in tensorboard_pages.data_page(both, layouts, include_rows=False)


def test_the_configuration_page_begins_with_what_was_set() -> None:
    page = tensorboard_pages.configuration_page(
        {"training": {"seed": 1, "learning_rate": 0.1}}, {"training.learning_rate"}
    )
    assert page.index("learning") < page.index("Defaults") < page.index("seed")


def test_hparams_begin_with_the_learning_rate() -> None:
    """TensorBoard sorts the columns by name and shows another name, if there is one."""
    from tensorboard.plugins.hparams import metadata

    first = {"learning rate": 1e-3, "rank": 8, "batch": 16, "epochs": 2.5}
    experiment, begin = tensorboard_pages.hyperparameters(
        first, {"GPU": "x", "data.max_length": 8, "lora": None, "a": True}
    )
    columns = metadata.parse_experiment_plugin_data(experiment.value[0].metadata.plugin_data.content).hparam_infos
    shown = [column.display_name or column.name for column in sorted(columns, key=lambda one: one.name)]
    assert shown == [*first, "GPU", "a", "data.max_length"]
    values = metadata.parse_session_start_info_plugin_data(begin.value[0].metadata.plugin_data.content).hparams
    assert values.keys() == {column.name for column in columns}
    assert [values[name].number_value for name in sorted(values)[:4]] == list(first.values())


def test_a_run_ends_in_hparams_with_its_status() -> None:
    from tensorboard.plugins.hparams import metadata

    status = [
        metadata.parse_session_end_info_plugin_data(
            tensorboard_pages.session_end(succeeded=succeeded).value[0].metadata.plugin_data.content
        ).status
        for succeeded in (True, False)
    ]
    assert status == [1, 2]  # tensorboard/plugins/hparams/api.proto: STATUS_SUCCESS, STATUS_FAILURE


def rank(number: int, **phases: float) -> RankRecord:
    seconds = dict.fromkeys(("data_wait", "forward", "backward", "communication", "optimizer", "other"), 0.0) | phases
    return RankRecord(
        rank=number, step=sum(seconds.values()), **seconds, own_work=None, wait=0.0, peak_gib=1.0, reserved_gib=None,
        allocator_retries=0, tokens=1, squared_lengths=1, gpu=None,
    )  # fmt: skip


def test_bars_are_as_long_as_the_phases() -> None:
    picture = tensorboard_pages.timeline([rank(0, forward=3.0, backward=1.0), rank(1, data_wait=4.0)])
    assert picture.dtype == np.uint8 and picture.shape[2] == 3

    def pixels(name: str, row: int) -> int:
        color = [int(tensorboard_pages.COLORS[name][place : place + 2], 16) for place in (1, 3, 5)]
        line = picture[12 + 40 * row + 14]
        return int((line == color).all(axis=1).sum())

    assert pixels("forward", 0) == pytest.approx(525, abs=2) and pixels("backward", 0) == pytest.approx(175, abs=2)
    assert pixels("data_wait", 1) == pytest.approx(700, abs=2) and pixels("forward", 1) == 0
