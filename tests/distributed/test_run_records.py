"""What a run of two ranks writes beside its model: TensorBoard's events, ranks.jsonl and run.json."""

from __future__ import annotations

import json
import sys
import types
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from finetune.engine.monitoring import tensorboard_pages
from finetune.review.assemble import review
from finetune.review.page import html
from finetune.runtime.tags import BY_NAME, PHASES, tag
from tests.cases import models
from tests.helpers import launch

pytestmark = pytest.mark.process


def events_of(out: Path) -> EventAccumulator:
    events = EventAccumulator(str(out / "runs" / out.name), size_guidance={"scalars": 0, "tensors": 0})
    return events.Reload()


def arguments(model: Path, data: Path, steps: int) -> list[str]:
    return [
        *("--model.model_name_or_path", str(model), "--data.train_file", str(data / "train.jsonl")),
        *("--data.eval_fraction", "0.2", "--training.eval_steps", "5", "--training.save_steps", "6"),
        *("--training.global_batch_size", "4", "--training.max_steps", str(steps), "--logging.logging_steps", "4"),
        *("--model.backend", "transformers", "--data.packing", "false", "--training.learning_rate", "1e-3"),
    ]


@pytest.fixture(scope="module")
def run(tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("records") / "out"
    return out, launch.train("2 ranks", arguments(tiny_model, tiny_data, 10), out=out, cache=out.parent)


def test_charts_have_a_point_for_each_step(run: tuple[Path, dict]) -> None:
    out, found = run
    events = events_of(out)
    for name in ("loss", "gradient_norm", "learning_rate"):
        assert [event.step for event in events.Scalars(tag(name))] == list(range(1, 11)), name
    assert [event.value for event in events.Scalars(tag("loss"))] == pytest.approx(found["losses"])
    evaluations = events.Scalars(tag("eval_loss"))
    assert [event.step for event in evaluations] == [0, 5, 10]  # once each, though step 10 is evaluated twice
    assert [event.value for event in evaluations] == pytest.approx([one["loss"] for one in found["evaluations"]])
    assert evaluations[-1].value == pytest.approx(found["eval_loss_after"])
    assert 0 <= events.Scalars(tag("eval_token_accuracy"))[-1].value <= 1
    assert "1 data/text_summary" in events.Tags()["tensors"]


@pytest.mark.campaign
def test_two_ranks_count_the_tokens_of_experts_as_one(tiny_data: Path, tmp_path: Path) -> None:
    """Both also accumulate, and pad their micro-batches differently. No dense run has these charts."""
    model = models.make("moe", tmp_path / "moe")
    names = [name for name in BY_NAME if name.startswith("expert")]
    found = {}
    for how in ("1 rank", "2 ranks"):
        out = tmp_path / how.replace(" ", "-")
        extra = ["--training.router_aux_loss_coef", "0", "--training.per_device_train_batch_size", "1"]
        words = [*arguments(model, tiny_data, 3), *extra, "--logging.logging_steps", "3"]
        launch.train(how, words, out=out, cache=tmp_path)
        events = events_of(out)
        found[how] = {name: events.Scalars(tag(name))[0].value for name in names if name != "expert_load"}
        assert [event.step for event in events.Histograms(tag("expert_load"))] == [3]
    assert len(found["1 rank"]) == 5 and found["2 ranks"] == found["1 rank"]
    assert 1 < found["1 rank"]["expert_load_max"] <= found["1 rank"]["expert_load_max_worst"] <= 2


def test_a_dense_run_has_no_charts_of_experts(run: tuple[Path, dict]) -> None:
    out, found = run
    tags = {one for kind in events_of(out).Tags().values() if isinstance(kind, list) for one in kind}
    assert not tags & {BY_NAME[name].tag for name in BY_NAME if name.startswith("expert")}
    assert found["experts"] is None and found["parameters"] == found["active_parameters"]


def test_phases_sum_to_the_step_in_charts_and_on_each_rank(run: tuple[Path, dict]) -> None:
    out, _ = run
    events = events_of(out)
    sums: Counter[int] = Counter()
    for phase in PHASES:
        for event in events.Scalars(tag(phase)):
            sums[event.step] += event.value
    steps = {event.step: event.value for event in events.Scalars(tag("step_seconds"))}
    assert sums == pytest.approx(steps, rel=0.02) and list(steps) == [4, 8, 10]
    start, *records = [json.loads(line) for line in (out / "runs" / "ranks.jsonl").read_text().splitlines()]
    assert (start["kind"], start["world_size"], start["logging_steps"], start["step"]) == ("start", 2, 4, 0)
    assert all(one["host"] and one["device"] for one in start["ranks"])
    assert [one["step"] for one in records] == [4, 8, 10] and [one["steps"] for one in records] == [3, 4, 2]
    for record in records:
        assert len(record["step_seconds"]) == record["steps"]
        for rank in record["ranks"]:
            assert sum(rank[phase] for phase in PHASES) == pytest.approx(rank["step"])
            assert rank["own_work"] == pytest.approx(rank["step"] - rank["communication"]) and rank["peak_gib"] > 0.1


def test_evaluation_and_saving_are_in_no_step(run: tuple[Path, dict]) -> None:
    """tokens/s, MFU and the score of the prediction go by the time of steps alone."""
    out, found = run
    records = [json.loads(line) for line in (out / "runs" / "ranks.jsonl").read_text().splitlines()[1:]]
    steps = sum(sum(record["step_seconds"]) for record in records)
    apart = found["evaluation_seconds"] + found["saving_seconds"]
    assert found["evaluation_seconds"] > 0 and found["saving_seconds"] > 0
    assert steps + apart < found["training_seconds"]
    tokens = sum(rank["tokens"] for record in records for rank in record["ranks"])
    first = found["tokens"] - round(found["tokens_per_second_per_gpu"] * 2 * steps)  # of the step that compiles
    assert 0 < first and tokens == found["tokens"]


# --- TensorBoard on the run -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(run: tuple[Path, dict]) -> Iterator[str]:
    """TensorBoard's address."""
    with launch.dashboard(run[0], cache=run[0].parent) as found:
        yield found


def get(address: str, route: str, **parameters: str) -> Any:
    """The JSON answer of a route of TensorBoard."""
    url = f"{address}/data/{route}" + ("?" + urllib.parse.urlencode(parameters) if parameters else "")
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.loads(answer.read())


def test_tensorboard_has_data_for_every_panel(address: str) -> None:
    """Over its own routes, which its pages use as well."""
    plugins = get(address, "plugins_listing")
    for name in ("scalars", "custom_scalars", "text", "histograms", "finetune"):
        assert plugins[name]["enabled"], name
    assert plugins["finetune"]["tab_name"] == "Review"
    (name,) = get(address, "runs")
    categories = get(address, "plugin/custom_scalars/layout")["category"]
    assert [one["title"] for one in categories] == list(tensorboard_pages.layout())
    empty = []
    for chart in (chart for one in categories for chart in one["chart"]):
        patterns = [pattern for pattern in chart.get("multiline", {}).get("tag", [])]
        margins = [value for series in chart.get("margin", {}).get("series", []) for value in series.values()]
        found = [get(address, "plugin/custom_scalars/scalars", tag=pattern, run=name) for pattern in patterns]
        points = [len(values) for one in found for values in one["tag_to_events"].values()]
        points += [len(get(address, "plugin/scalars/scalars", tag=one, run=name)) for one in margins]
        empty += [] if any(points) else [chart["title"]]
    only_on_gpus = {"fullest GPU [0-1]", *(chart for chart in tensorboard_pages.layout()["5 GPUs"])}
    assert set(empty) == only_on_gpus
    texts = get(address, "plugin/text/tags")[name]
    assert "1 data/text_summary" in texts
    (page,) = get(address, "plugin/text/text", run=name, tag="1 data/text_summary")
    assert "<table>" in page["text"] and "rows read" in page["text"]


def test_the_tab_has_the_verdict_of_review(address: str, run: tuple[Path, dict]) -> None:
    (shown,) = get(address, "plugin/finetune/review")["runs"]
    (reviewed,) = review([run[0]]).to_dict()["runs"]
    assert shown["verdict"] == reviewed["verdict"] and shown["tensorboard"] == "runs/out"
    assert set(shown["bars"]) == {"0", "1"} and len(shown["curve"]["loss"]) == 10


def test_a_plugin_that_fails_leaves_tensorboard_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune.review.board.plugin import ReviewPlugin

    monkeypatch.setitem(sys.modules, "finetune.review.run", None)
    plugin = ReviewPlugin(types.SimpleNamespace(logdir=str(tmp_path)))  # type: ignore[arg-type]
    assert plugin.is_active() is False
    assert "The review failed: ModuleNotFoundError" in plugin.review()["error"]


def test_the_pages_in_a_browser(address: str, browser: Any) -> None:
    """The loss is seen without a click, custom scalars have lines, and Review names what limits the run."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    errors, hosts = [], set()
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: hosts.add(urllib.parse.urlsplit(request.url).netloc))
    page.goto(f"{address}/#timeseries")
    card = page.locator("card-view", has_text="1 learning/loss [nats]")
    card.locator("line-chart").first.wait_for()
    box = card.bounding_box()
    assert box is not None and box["y"] < 1000  # on the first screen
    page.goto("about:blank")
    page.goto(f"{address}/#custom_scalars")
    chart = page.locator("tf-custom-scalar-multi-line-chart-card", has_text="loss [nats per supervised token]")
    chart.locator("svg path[d*='L']").first.wait_for(state="attached")
    page.goto("about:blank")
    page.goto(f"{address}/#finetune")
    frame = page.frame_locator("iframe")
    frame.locator("[data-panel=verdict]").first.wait_for()
    assert frame.locator("[data-panel=verdict]").count() == 2  # Learning and Speed
    assert frame.locator("rect[data-rank='1']").count() >= 4
    assert frame.locator("path[data-line='training loss']").count() == 1
    assert errors == [] and hosts <= {urllib.parse.urlsplit(address).netloc, ""}
    page.close()


def test_the_report_needs_no_network_and_shows_names_as_text(
    tmp_path: Path, run: tuple[Path, dict], browser: Any
) -> None:
    reviewed = review([run[0]]).to_dict()
    reviewed["runs"][0]["run"] = "</script><script>document.title = 'broken'</script>"
    (tmp_path / "report.html").write_text(html(reviewed), encoding="utf-8")
    page = browser.new_page(offline=True)
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.goto((tmp_path / "report.html").as_uri())
    page.locator("[data-panel=verdict]").first.wait_for()
    assert (
        page.locator("h2").first.text_content() == reviewed["runs"][0]["run"]
        and page.title() == f"Review of {reviewed['runs'][0]['run']}"
    )
    assert page.locator("path[data-line='training loss']").count() == 1 and len(requested) == 1
    page.close()


@pytest.mark.campaign
def test_a_run_that_diverges_ends_with_a_checkpoint(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    words = [*arguments(tiny_model, tiny_data, 200), "--training.stop_on_divergence", "true"]
    # A rate that rises from a good one to one that is far too high.
    words += ["--training.learning_rate", "1.0", "--training.lr_scheduler_type", "constant_with_warmup"]
    words += ["--training.warmup_steps", "40", "--training.save_steps", "0", "--training.optim", "adamw_torch"]
    words += ["--training.output_dir", str(tmp_path / "out")]
    words += ["--model.full_finetuning", "true", "--training.eval_steps", "0", "--logging.generate_samples", "0"]
    done = launch.run("2 ranks", words, cache=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stdout, done.stdout[-4000:]
    found = launch.read(tmp_path / "out")
    assert found["status"] == "failed" and "The run diverges at step" in found["error"]
    (checkpoint,) = (tmp_path / "out").glob("checkpoint-*")
    assert f"{checkpoint} is saved" in found["error"] and int(checkpoint.name.split("-")[1]) < 200
