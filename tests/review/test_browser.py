"""The dashboard and the report in Chromium, on recorded runs: what a newcomer sees without a click or a setting."""

from __future__ import annotations

import re
import shutil
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune import dashboard
from finetune.engine.monitoring import tensorboard_pages
from finetune.engine.monitoring.event_file import EventFile
from finetune.review import page as report
from finetune.review import run as runs
from finetune.review.assemble import review
from tests.helpers import launch
from tests.review import record

pytestmark = pytest.mark.process

RUNS = ("healthy-lora", "leak", "healthy-packed", "slow-rank-compute", "overfitting", "h200-slow-rank")
WINDOW = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("outputs")
    for name in RUNS:
        shutil.copytree(record.FIXTURES / name, made / name)
    events = EventFile(made / "overfitting" / "runs" / "overfitting")  # recorded runs have scalars alone
    events.add_custom_scalars(tensorboard_pages.layout())
    events.close()
    return made


@pytest.fixture(scope="module")
def address(folder: Path, browser: Any) -> Iterator[str]:
    """When TensorBoard has read the runs: it shows the tabs for which there was data when its page was opened."""
    with launch.dashboard(folder, cache=folder) as found:
        page = browser.new_page()
        page.goto(f"{found}/data/plugins_listing")
        page.wait_for_function("async () => (await (await fetch(location)).json()).custom_scalars.enabled", polling=100)
        page.close()
        yield found


class Seen:
    """A page, what it complained about and whom it asked."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.page = browser.new_page(viewport=WINDOW, **options)
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("request", lambda request: self.hosts.add(urllib.parse.urlsplit(request.url).netloc))


@pytest.fixture
def seen(browser: Any) -> Iterator[Seen]:
    made = Seen(browser)
    yield made
    made.page.close()


def test_the_plain_address_opens_the_review(address: str, seen: Seen) -> None:
    seen.page.goto(address)
    seen.page.frame_locator("iframe").locator("[data-panel=verdict]").first.wait_for()
    tab = seen.page.locator(".plugin-name[data-plugin-id=finetune]:visible")
    box = tab.bounding_box()
    assert tab.text_content().strip() == "Review" and box is not None
    assert 0 <= box["x"] and box["x"] + box["width"] < WINDOW["width"] / 2  # the first tab: nothing covers it
    assert seen.errors == [] and seen.hosts == {urllib.parse.urlsplit(address).netloc}


@pytest.mark.campaign
def test_curves_end_at_the_values_that_were_written(address: str, folder: Path, seen: Seen) -> None:
    """The link to the charts has them without smoothing."""
    page = seen.page
    page.goto(dashboard.links(f"{address}/")["charts"])
    card = page.locator("card-view", has_text="1 learning/eval loss [nats]").first
    row = card.locator("tb-data-table-content-row", has_text="overfitting")
    row.wait_for()
    last = runs.read(folder / "overfitting").series("eval_loss").last
    shown = [float(word) for word in row.inner_text().split() if re.fullmatch(r"\d+\.\d+", word)]
    assert shown[0] == pytest.approx(last, abs=1e-3) and "Smoothed" not in card.inner_text()
    assert seen.errors == [] and seen.hosts == {urllib.parse.urlsplit(address).netloc}


def test_runs_are_sorted_filtered_and_hidden(address: str, seen: Seen) -> None:
    seen.page.goto(address)
    frame = seen.page.frame_locator("iframe")
    lines = frame.locator("tr[data-run-line]:visible")
    lines.first.wait_for()
    assert lines.count() == len(RUNS)
    assert all(line.bounding_box()["height"] <= 62 for line in lines.all())
    inner = seen.page.frames[1]
    assert inner.evaluate("document.documentElement.scrollWidth <= innerWidth")  # nothing is cut at 1280 pixels

    heads = [head.removesuffix(" \u2193") for head in frame.locator("table.runs th").all_inner_texts()]
    assert heads[:4] == ["run", "model", "verdict", "training loss"]
    assert frame.locator("tr[data-run-line] .first").count() > 0
    text = frame.locator("main").inner_text()
    assert "run finetune doctor" in text and "`" not in text
    assert "(median of the last tenth" in frame.locator("[data-panel=curves] .legend").first.inner_text()
    column = heads.index("tokens/s per device")
    frame.get_by_role("button", name="tokens/s per device").click()
    rates = [float(line.locator("td").nth(column).inner_text().replace(",", "")) for line in lines.all()]
    assert rates == sorted(rates, reverse=True)
    assert frame.locator("th[aria-sort=descending]").count() == 1

    frame.get_by_label("Filter runs").fill("slow-rank")
    assert lines.count() == 2 and frame.get_by_text("2 of 6 shown").is_visible()
    frame.get_by_label("Filter runs").fill("")
    shown = frame.locator("section[data-panel=curves] path[data-line=leak]")
    assert shown.count() == 1
    frame.get_by_label("show leak").click()
    assert shown.count() == 0 and frame.get_by_text("5 of 6 shown").is_visible() and lines.count() == 6


@pytest.mark.campaign
def test_models_and_times_are_not_mixed_up(address: str, seen: Seen) -> None:
    """Runs of different models are not in one chart, and nobody reads 0.0042 h."""
    seen.page.goto(address)
    frame = seen.page.frame_locator("iframe")
    frame.locator("[data-panel=models]").wait_for()
    charts = frame.locator("section[data-panel=curves]")
    names = [
        {one.get_attribute("data-line") for one in chart.locator("path[data-line]").all()} for chart in charts.all()
    ]
    assert names and not any("h200-slow-rank" in one for one in names)
    text = frame.locator("table.runs").inner_text()
    assert re.search(r"\b0:\d\d\b", text) and " ms" in text and not re.search(r"\d h\b|e-\d", text)


def test_a_report_tells_what_ran(folder: Path, tmp_path: Path, browser: Any) -> None:
    """Who gets it by mail has nothing else."""
    reviewed = review([folder / "leak", folder / "overfitting"]).to_dict()
    (tmp_path / "report.html").write_text(report.html(reviewed), encoding="utf-8")
    seen = Seen(browser, offline=True)
    seen.page.goto((tmp_path / "report.html").as_uri())
    seen.page.locator("h1").wait_for()
    assert seen.page.title() == seen.page.locator("h1").inner_text() == "Review of leak, overfitting"
    text = seen.page.locator("main").inner_text()
    for part in (r"Written 20\d\d-\d\d-\d\d", "train.jsonl", "2 . x86_64", r"torch 2\.", "Settings that differ: "):
        assert re.search(part, text), part
    found = next(one for one in reviewed["runs"] if one["run"] == "leak")
    box = seen.page.locator("[data-explains=leak]")
    box.locator("summary").click()
    assert found["findings"][0]["evidence"] in text and "finetune review --explain leak" in box.inner_text()
    assert seen.errors == [] and seen.hosts == {""}
    seen.page.close()
