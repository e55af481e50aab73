"""Reading runs: event files as torch's SummaryWriter writes them, ranks.jsonl, run.json, and hostile files."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune import cli
from finetune.errors import UserError
from finetune.review import command, events, report
from finetune.review import run as runs
from finetune.review.assemble import review
from finetune.runtime.tags import tag
from tests.review import synthetic

LOSS = tag("loss")
HOSTILE = "[bold red]x[/] <script>alert(1)</script> | \x1b[31m a\nb"


def write(folder: Path, scalars: dict[str, list[tuple[int, float]]], *, purge: int | None = None) -> Path:
    """A file of events as torch writes it; returns it."""
    from torch.utils.tensorboard import SummaryWriter

    before = set(folder.glob("*")) if folder.exists() else set()
    writer = SummaryWriter(str(folder), purge_step=purge)
    for name, points in scalars.items():
        for step, value in points:
            writer.add_scalar(name, value, step)
    writer.close()
    [made] = set(folder.glob("*tfevents*")) - before
    return made


def points(folder: Path, name: str = LOSS) -> list[tuple[int, float]]:
    found = events.read(sorted(folder.rglob("*tfevents*")), (LOSS, "train/loss"))[name]
    return list(zip(found.steps.tolist(), found.values.tolist(), strict=True))


def steps(first: int, last: int, value: float) -> list[tuple[int, float]]:
    return [(step, value) for step in range(first, last + 1)]


# --- events ----------------------------------------------------------------------------------------------------------


def test_scalars_are_those_that_tensorboard_reads(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, {LOSS: [(step, 1 / step) for step in range(1, 50)], "a/b": [(7, 2.5)]})
    reader = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    reader.Reload()
    found = events.read(list(tmp_path.glob("*")), (LOSS,))
    assert sorted(found) == sorted(reader.Tags()["scalars"])
    for name, series in found.items():
        expected = [(one.step, one.value, one.wall_time) for one in reader.Scalars(name)]
        columns = (series.steps.tolist(), series.values.tolist(), series.times.tolist())
        assert list(zip(*columns, strict=True)) == expected


@pytest.mark.parametrize("cut", [1, 5, 15, 20, 40])
def test_an_incomplete_tail_ends_a_file(tmp_path: Path, cut: int) -> None:
    file = write(tmp_path, {LOSS: steps(1, 20, 1.0)})
    size = file.stat().st_size
    os.truncate(file, size - cut)
    assert points(tmp_path) == steps(1, 19, 1.0)[: 19 if cut < 40 else None]


@pytest.mark.parametrize("garbage", [bytes(4096), b"\xff" * 4096, b"not a record" * 50])
def test_what_is_no_record_ends_a_file(tmp_path: Path, garbage: bytes) -> None:
    file = write(tmp_path, {LOSS: steps(1, 5, 1.0)})
    with file.open("ab") as stream:
        stream.write(garbage)
    assert points(tmp_path) == steps(1, 5, 1.0)


def test_a_damaged_record_is_left_out(tmp_path: Path) -> None:
    file = write(tmp_path, {LOSS: steps(1, 5, 1.0)})
    content = bytearray(file.read_bytes())
    place = content.index(LOSS.encode())
    content[place - 2] = 0xFF  # the length of the tag: the message is invalid, the record's frame is whole
    file.write_bytes(content)
    assert len(points(tmp_path)) == 4


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.1.host.1.0").touch()
    write(tmp_path, {LOSS: steps(1, 3, 1.0)})
    assert points(tmp_path) == steps(1, 3, 1.0)


def test_a_resumed_run_replaces_what_it_repeats(tmp_path: Path) -> None:
    write(tmp_path, {LOSS: steps(1, 30, 1.0), "other": [(5, 1.0), (25, 1.0)], "eval": [(10, 1.0), (30, 1.0)]})
    write(tmp_path, {"eval": [(0, 9.0)], LOSS: steps(21, 40, 2.0)}, purge=21)
    assert points(tmp_path) == steps(1, 20, 1.0) + steps(21, 40, 2.0)
    assert points(tmp_path, "other") == [(5, 1.0)]
    assert points(tmp_path, "eval") == [(0, 9.0), (10, 1.0)]


def test_files_are_ordered_by_when_they_were_begun(tmp_path: Path) -> None:
    first = write(tmp_path, {LOSS: steps(1, 30, 1.0)})
    second = write(tmp_path, {LOSS: steps(21, 40, 2.0)})
    os.rename(first, tmp_path / "z.tfevents")
    os.rename(second, tmp_path / "a.tfevents")
    assert points(tmp_path) == steps(1, 20, 1.0) + steps(21, 40, 2.0)


def test_a_file_without_training_steps_only_adds(tmp_path: Path) -> None:
    write(tmp_path, {LOSS: steps(1, 30, 1.0), "eval": [(10, 1.0)]})
    write(tmp_path, {"eval": [(20, 2.0)]})
    assert points(tmp_path) == steps(1, 30, 1.0)
    assert points(tmp_path, "eval") == [(10, 1.0), (20, 2.0)]


def test_purge_inside_a_file(tmp_path: Path) -> None:
    write(tmp_path / "a", {LOSS: steps(1, 30, 1.0)})
    write(tmp_path / "b", {LOSS: steps(11, 12, 2.0)}, purge=11)
    joined = b"".join(next((tmp_path / name).glob("*")).read_bytes() for name in ("a", "b"))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "events.out.tfevents.1").write_bytes(joined)
    assert points(tmp_path / "c") == steps(1, 10, 1.0) + steps(11, 12, 2.0)


def test_nan_and_infinity_are_kept_and_the_last_value_of_a_step_counts(tmp_path: Path) -> None:
    write(tmp_path, {LOSS: [(1, math.nan), (2, math.inf), (3, 1.0), (3, 2.0)]})
    (_, nan), *rest = points(tmp_path)
    assert math.isnan(nan) and rest == [(2, math.inf), (3, 2.0)]


# --- folders ----------------------------------------------------------------------------------------------------------


def make_run(out: Path, *, name: str | None = None, record: dict[str, Any] | None = None, **more: Any) -> Path:
    """The output folder of a healthy run, as files."""
    healthy = synthetic.run(**more)
    folder = out / "runs" / name if name else out / "runs"
    points = {
        key: list(zip(one.steps.tolist(), one.values.tolist(), strict=True)) for key, one in healthy.scalars.items()
    }
    write(folder, points)
    starts, lines = synthetic.lines(**{key: value for key, value in more.items() if key not in ("loss", "series")})
    (out / "runs" / "ranks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in [*starts, *lines]))
    (out / "run.json").write_text(json.dumps(healthy.record | (record or {})))
    return out


@pytest.mark.parametrize("place", [".", "runs", "runs/out"])
def test_a_run_is_found_from_each_of_its_folders(tmp_path: Path, place: str) -> None:
    found = runs.read(make_run(tmp_path / "out", name="out") / place)
    assert (found.name, found.world_size, found.steps, found.status) == ("out", 2, 200, "done")
    assert found.ranks is not None and found.ranks.world_size == 2
    assert len(found.series("loss")) == 200


def test_a_copied_folder_of_events_is_a_run(tmp_path: Path) -> None:
    out = make_run(tmp_path / "out", name="out", slow={1: {"forward": 0.5}})
    shutil.copytree(out / "runs", tmp_path / "copy")
    found = review([tmp_path / "copy" / "out"]).to_dict()["runs"][0]
    assert [one["rule"] for one in found["findings"]] == ["straggler"]


def test_runs_in_a_folder_are_found(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name, name=name)
    write(tmp_path / "trl" / "runs" / "Nov01_host", {"train/loss": steps(1, 3, 1.0)})
    write(tmp_path / "logs" / "x", {"train/loss": steps(1, 3, 1.0)})
    (tmp_path / "a" / "checkpoint-5").mkdir()
    expected = [tmp_path / name for name in ("a", "b", "logs/x", "trl")]
    assert runs.find(tmp_path) == expected
    assert sorted(command.expand([tmp_path, tmp_path / "a"])) == expected


def test_no_run(tmp_path: Path) -> None:
    make_run(tmp_path / "all" / "a")
    (tmp_path / "empty").mkdir()
    for folder, text in (("missing", "is not a folder"), ("empty", "has neither run.json"), ("all", "holds 1 run,")):
        with pytest.raises(UserError, match=text):
            runs.read(tmp_path / folder)


def test_a_run_of_trl_lacks_what_it_lacks(tmp_path: Path) -> None:
    trl = {
        "train/loss": [(step, 2 - step / 1000) for step in range(10, 301, 10)],
        "train/grad_norm": [(step, 0.5) for step in range(10, 301, 10)],
        "train/learning_rate": [(step, 1e-4 * (1 - step / 300)) for step in range(10, 301, 10)],
        "train/num_tokens": [(step, 1e4 * step) for step in range(10, 301, 10)],
        "train/mean_token_accuracy": [(step, 0.6) for step in range(10, 301, 10)],
        "eval/loss": [(100, 1.5), (200, 1.4), (300, 1.3)],
    }
    write(tmp_path / "runs" / "Nov01_00-00-00_host", trl)
    one = review([tmp_path]).to_dict()["runs"][0]
    assert one["findings"] == [] and one["status"] == "not recorded"
    assert [half["sentence"] for half in one["halves"]] == [
        "held-out loss 1.5 -> 1.3 since step 100.", "no step times are recorded."
    ]  # fmt: skip
    assert [half["level"] for half in one["halves"]] == ["good", "unknown"]
    assert set(one["metrics"]) == {
        *("loss", "eval_loss", "gradient_norm", "learning_rate", "tokens_seen", "token_accuracy")
    }
    assert one["ranks"] == [] and one["bars"] == {}


def test_a_trl_run_that_diverges_is_reported(tmp_path: Path) -> None:
    values = np.concatenate([np.linspace(3, 1, 30), np.linspace(1, 4, 30)])
    write(tmp_path, {"train/loss": [(10 * place, value) for place, value in enumerate(values, start=1)]})
    assert [one["rule"] for one in review([tmp_path]).to_dict()["runs"][0]["findings"]] == ["diverging"]


@pytest.mark.parametrize(
    ("status", "age", "expected"),
    [("running", 5, "running"), ("running", 5000, "ended without a record"), ("failed", 5, "failed"),
     ("interrupted", 5, "interrupted"), (7, 5000, "ended without a record")],
)  # fmt: skip
def test_status(tmp_path: Path, status: Any, age: float, expected: str) -> None:
    make_run(tmp_path, record={"status": status})
    newest = float(events.read(list((tmp_path / "runs").glob("*tfevents*")), (LOSS,))[LOSS].times[-1])
    assert runs.read(tmp_path, now=newest + age).status == expected


# --- ranks.jsonl ------------------------------------------------------------------------------------------------------


def rank_file(path: Path, *parts: Any) -> Path:
    path.write_text("".join(part if isinstance(part, str) else json.dumps(part) + "\n" for part in parts))
    return path


def test_records_of_a_resumed_run(tmp_path: Path) -> None:
    from finetune.review import ranks

    starts, lines = synthetic.lines(2, count=10)
    again = starts[0] | {"step": 50}
    later, slow = synthetic.lines(2, count=8, phases={"forward": 2.3})
    path = rank_file(tmp_path / "ranks.jsonl", *starts, *lines, again, *slow[5:], '{"kind": "record", "st')
    found = ranks.read(path)
    assert found is not None
    assert found.steps.tolist() == [10, 20, 30, 40, 50, 60, 70, 80]
    assert found.columns["step"][:, 0].round(3).tolist() == [1.0] * 5 + [3.0] * 3
    assert found.typical().tolist() == [False, True, True, True, True, False, True, True]  # a warm-up per start


def test_ranks_of_another_world_size_are_left_out(tmp_path: Path) -> None:
    from finetune.review import ranks

    starts, lines = synthetic.lines(4, count=4)
    again, more = synthetic.lines(2, count=8)
    path = rank_file(tmp_path / "ranks.jsonl", *starts, *lines, again[0] | {"step": 40}, *more[4:])
    found = ranks.read(path)
    assert found is not None and found.world_size == 2 and found.steps.tolist() == [50, 60, 70, 80]


def test_a_long_file_is_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune.review import ranks

    monkeypatch.setattr(ranks, "MOST_RECORDS", 20)
    starts, lines = synthetic.lines(2, count=100, slow={1: {"forward": 0.5}})
    found = ranks.read(rank_file(tmp_path / "ranks.jsonl", *starts, *lines))
    assert found is not None and 20 <= len(found.steps) <= 40


# --- hostile files ----------------------------------------------------------------------------------------------------

HUGE = 10**400
WRONG: list[Any] = [None, HUGE, HOSTILE]
MORE: list[Any] = [-1, [[]], True, "text", 1e308, [], {}, {"a": {"b": []}}]  # as well, by `make test-full`


@pytest.mark.parametrize("wrong", [*WRONG, *(pytest.param(one, marks=pytest.mark.campaign) for one in MORE)])
def test_values_of_wrong_types_do_no_harm(tmp_path: Path, wrong: Any) -> None:
    def spoiled(tree: Any) -> list[Any]:
        """The tree with each of its values in turn replaced."""
        found: list[Any] = [wrong]
        if isinstance(tree, dict):
            found += [tree | {key: one} for key, value in tree.items() for one in spoiled(value)]
        elif isinstance(tree, list) and tree:
            found += [[one, *tree[1:]] for one in spoiled(tree[0])]
        return found

    record = synthetic.run().record | {
        "ledger": {"eval": {"rows_read": 9, "leaked": {"rows": 1, "first": {"file": "a", "line": 1}}}},
        "micro_batch_search": {"attempts": [{"per_device": 1, "tokens_per_second": 1.0}]},
        "evaluations": [{"step": 1, "loss": 1.0}],
        "prediction": {"step_seconds": {"predicted": 1.0, "measured": 1.0, "error": 0.0}},
        "losses": [1.0, 2.0],
    }
    starts, lines = synthetic.lines(count=4)
    make_run(tmp_path, loss=synthetic.losses(20))
    for content in spoiled(record):
        (tmp_path / "run.json").write_text(json.dumps(content))
        json.dumps(review([tmp_path]).to_dict(), allow_nan=False)
    (tmp_path / "run.json").write_text(json.dumps(record))
    for entry in (starts[0], lines[2]):
        for content in spoiled(entry):
            rank_file(tmp_path / "runs" / "ranks.jsonl", *starts, *lines, content)
            json.dumps(review([tmp_path]).to_dict(), allow_nan=False)


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "[" * 100_000, '{"steps": ' + "9" * 5000 + "}", "\xff"])
def test_a_damaged_run_json_is_reported(tmp_path: Path, content: str) -> None:
    make_run(tmp_path)
    (tmp_path / "run.json").write_text(content, encoding="latin-1")
    one = review([tmp_path]).to_dict()["runs"][0]
    assert len(one["problems"]) == 1 and "run.json" in one["problems"][0]
    assert one["curve"]["loss"]


def test_names_of_a_run_are_shown_and_not_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    starts, lines = synthetic.lines(slow={1: {"forward": 0.5}})
    starts[0]["ranks"][1] |= {"host": HOSTILE, "device": HOSTILE}
    make_run(tmp_path / "a", record={"status": "failed", "error": HOSTILE, "config": {"model": {HOSTILE: HOSTILE}}})
    make_run(tmp_path / "[bold]b", record={"backend": HOSTILE})
    rank_file(tmp_path / "a" / "runs" / "ranks.jsonl", *starts, *lines)
    assert command.main([str(tmp_path / "a"), str(tmp_path / "[bold]b")]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "[bold red]x[/]" in "".join(shown.split("\n")) and "[bold]b" in shown


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_compares_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "one", world=1, series={"rows_per_second": ([50, 200], [100.0] * 2)})
    make_run(tmp_path / "two", world=2, series={"rows_per_second": ([50, 200], [130.0] * 2)},
             record={"batch": {"per_device": 8}})  # fmt: skip
    folders = [str(tmp_path / name) for name in ("one", "two")]
    assert cli.main(["review", *folders, "--json", str(tmp_path / "r.json")]) == 0
    shown = capsys.readouterr().out
    for text in ("efficiency", "Speed-up", "65 %", "1.30", "rows per device and pass", "world size", "Metrics"):
        assert text in shown, text
    assert "training.learning_rate" not in shown  # equal in both
    found = json.loads((tmp_path / "r.json").read_text())
    assert [one["run"] for one in found["runs"]] == ["one", "two"]
    finding = found["runs"][1]["findings"][0]
    assert {"rule", "level", "evidence", "advice", "gain"} <= finding.keys() and finding["rule"] == "efficiency"
    (row,) = found["comparison"]["scaling"]
    assert (
        row["against"] == "one" and row["speed_up"] == pytest.approx(1.3) and row["efficiency"] == pytest.approx(0.65)
    )


def test_columns_that_do_not_fit_are_in_a_further_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 80 columns, no word is broken and nothing is cut off."""
    monkeypatch.setenv("COLUMNS", "80")
    for name in "abcdef":
        make_run(tmp_path / name, record={"config": {"data": {"train_file": f"{name * 30}.jsonl"}}})
    assert command.main([str(tmp_path / name) for name in "abcdef"]) == 0
    lines = capsys.readouterr().out.splitlines()
    tables = [line for line in lines if line.startswith(("│", "┃"))]
    assert tables and max(map(len, tables)) <= 80
    for words, times in (("no evaluation", 6), ("training loss, last tenth", 2), ("data.train_file", 2)):
        assert sum(line.count(words) for line in tables) == times, words


def test_runs_of_a_folder_are_in_the_order_of_the_review_tab(tmp_path: Path) -> None:
    for name, written in (("a", 100), ("b", 300), ("c", 200)):
        for path in make_run(tmp_path / name).rglob("*"):
            os.utime(path, (written, written))
    in_tab = [run.folder for run in runs.newest_first(tmp_path)]
    assert command.expand([tmp_path]) == in_tab == [tmp_path / name for name in "bca"]
    assert command.expand([tmp_path / "a", tmp_path]) == [tmp_path / name for name in "abc"]  # as given


def test_many_runs_are_a_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(8):
        make_run(tmp_path / f"run{number}", loss=synthetic.losses(20), slow={1: {"forward": number / 2}})
    assert command.main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert all(shown.count(f"\u2502 run{number} ") == 1 for number in range(8)), shown
    assert "Speed-up" not in shown  # all have two devices
    assert shown.count("straggler") == 7


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    healthy, slow = tmp_path / "healthy", tmp_path / "slow"
    make_run(healthy)
    make_run(slow, slow={1: {"forward": 1.0}})
    codes = {
        (str(healthy),): 0,
        (str(healthy), "--strict"): 0,
        (str(slow),): 0,
        (str(slow), "--strict"): 1,
        (str(tmp_path / "none"),): 2,
        (): 2,
        (str(healthy), "--srict"): 2,
    }
    assert {argv: command.main(list(argv)) for argv in codes} == codes
    assert "no run" in capsys.readouterr().err


def test_learning_curves_are_compared_at_equal_tokens(tmp_path: Path) -> None:
    tokens = {"tokens_seen": (list(range(1, 201)), [100.0 * step for step in range(1, 201)])}
    fast = {"tokens_seen": (list(range(1, 101)), [100.0 * step for step in range(1, 101)])}
    make_run(tmp_path / "a", loss=np.linspace(3, 1, 200), series=tokens)
    make_run(tmp_path / "b", loss=np.linspace(3, 1, 100), series=fast)
    rows = review([tmp_path / "a", tmp_path / "b"]).to_dict()["comparison"]["at_equal_tokens"]
    assert rows[-1]["tokens"] == 10_000
    assert rows[-1]["loss"] == [pytest.approx(2.05, abs=0.02), pytest.approx(1.05, abs=0.02)]


def test_losses_of_different_models_are_not_compared(tmp_path: Path) -> None:
    tokens = {"tokens_seen": (list(range(1, 201)), [100.0 * step for step in range(1, 201)])}
    for name, weights in (("a", "x"), ("b", "y"), ("c", "x")):
        make_run(tmp_path / name, series=tokens, record={"settings": {"base weights": weights}})
    rows = review([tmp_path / name for name in "abc"]).to_dict()["comparison"]["at_equal_tokens"]
    assert {row["model_id"] for row in rows} == {"x"} and len(rows) == 4
    assert all(row["loss"][1] is None and row["loss"][0] == row["loss"][2] for row in rows)
    assert review([tmp_path / name for name in "ab"]).to_dict()["comparison"]["at_equal_tokens"] == []


def test_time_of_a_resumed_run_is_that_of_all_sessions(tmp_path: Path) -> None:
    """Each process counts its hours from zero."""
    hours = {"hours": ([50, 100, 150, 200], [0.5, 1.0, 0.25, 0.75])}
    make_run(tmp_path, series=hours, record={"resumed_from": "out/checkpoint-100"})
    one = review([tmp_path]).to_dict()["runs"][0]
    assert one["metrics"]["hours"] == pytest.approx(1.75) and one["about"]["resumed_at"] == 100


def test_own_work_is_the_step_minus_communication_in_the_bar_and_in_the_table(tmp_path: Path) -> None:
    """Medians of unsteady phases do not add up to the median step by themselves."""
    one = review([make_run(tmp_path, jitter=0.3, slow={1: {"forward": 0.4}})]).to_dict()["runs"][0]
    for row in one["ranks"]:
        bar = one["bars"][str(row["rank"])]
        assert sum(bar.values()) == pytest.approx(row["step"])
        assert row["own_work"] == pytest.approx(row["step"] - bar["communication"])
        assert row["communication"] == bar["communication"] and row["data_wait"] == bar["data_wait"]
    assert one["ranks"][1]["own_work"] > one["ranks"][0]["own_work"] + 0.2


def test_the_table_of_ranks_has_the_tokens_of_a_step(tmp_path: Path) -> None:
    """A record holds the tokens of all its steps: 10,000 in 10."""
    one = review([make_run(tmp_path)]).to_dict()["runs"][0]
    assert [row["tokens"] for row in one["ranks"]] == [10_000 / synthetic.EVERY] * 2


def test_a_loss_that_ends_not_finite_is_not_its_last_finite_value(tmp_path: Path) -> None:
    loss = synthetic.losses(200)
    recovered, lost = loss.copy(), loss.copy()
    recovered[100], lost[-20:] = math.nan, math.nan
    evaluated = {"eval_loss": ([100, 200], [1.0, math.inf])}
    found = [make_run(tmp_path / "recovered", loss=recovered), make_run(tmp_path / "lost", loss=lost, series=evaluated)]
    reviewed = review(found)
    first, second = (one["metrics"] for one in reviewed.to_dict()["runs"])
    assert first["loss"] == pytest.approx(np.median(loss[-20:]), abs=0.01) and "eval_loss" not in first
    assert second["loss"] is None and second["eval_loss"] is None  # JSON has no NaN
    rows = {row[0]: row[1:] for row in report.metric_rows(reviewed.runs)}
    assert rows["training loss, last tenth"][1] == "not finite"
    assert rows["held-out loss"] == ["no evaluation", "not finite"]


def test_the_change_to_make_first_is_that_of_the_most_severe_finding(tmp_path: Path) -> None:
    search = {"micro_batch_search": {"attempts": [{"per_device": 16, "tokens_per_second": 1000.0}]}}
    small = {"tokens_per_gpu": ([50, 100, 200], [500.0] * 3), "fullest": ([100], [0.2])}  # a note
    make_run(tmp_path / "slow", slow={1: {"forward": 0.4}}, series=small, record=search)
    make_run(tmp_path / "healthy")
    healthy, slow = review([tmp_path / "healthy", tmp_path / "slow"]).to_dict()["runs"]
    assert healthy["change_first"] is None
    assert [one["level"] for one in slow["findings"]] == ["warning", "note"]
    assert slow["change_first"] == slow["findings"][0]["advice"] and "finetune doctor" in slow["change_first"]


def test_one_figure_for_one_thing(tmp_path: Path) -> None:
    """Table, phases of a step and prediction have what the run printed at its end: the figures of run.json."""
    scored = {"predicted": 0.8, "measured": 0.9, "error": -0.11}
    record = {"step_seconds_median": 0.9, "tokens_per_second_per_gpu": 500.0, "rows_per_second": 7.0, "mfu": 0.3}
    make_run(tmp_path, record=record | {"padding_fraction": 0.1, "prediction": {"step_seconds": scored}})
    one = review([tmp_path]).to_dict()["runs"][0]
    expected = {"step_seconds": 0.9, "tokens_per_gpu": 500.0, "tokens_total": 1000.0, "rows_per_second": 7.0}
    assert expected | {"mfu": 0.3, "padding": 0.1} == {
        name: one["metrics"][name] for name in [*expected, "mfu", "padding"]
    }
    assert [sum(phases.values()) for phases in one["bars"].values()] == pytest.approx([0.9, 0.9])
    assert sum(one["metrics"][phase] for phase in synthetic.HEALTHY) == pytest.approx(0.9)
    assert [row["measured"] for row in one["predicted"]] == [0.9] and "MFU 30 %" in one["verdict"]


def test_a_review_knows_what_ran(tmp_path: Path) -> None:
    config = {"model": {"model_name_or_path": "org/model"}, "training": {"learning_rate": 7e-5, "seed": 42}}
    config |= {"data": {"train": [{"file": "a.jsonl"}, {"name": "org/rows"}], "eval_file": "held.jsonl"}}
    make_run(tmp_path, record={"config": config, "versions": {"torch": "2.13.0", "unsloth": None}})
    about = review([tmp_path]).to_dict()["runs"][0]["about"]
    assert about["model"] == "org/model" and about["data"] == ["a.jsonl", "org/rows", "held out: held.jsonl"]
    assert about["versions"] == {"torch": "2.13.0"} and about["hardware"] == "NVIDIA H200"
    assert about["settings"]["training.learning_rate"] == 7e-5 and "training.seed" not in about["settings"]
    assert about["began"] is not None and about["ended"] >= about["began"]


def test_curves_stay_short_and_keep_what_is_not_finite(tmp_path: Path) -> None:
    loss = synthetic.losses(3000)
    loss[2000] = math.nan
    make_run(tmp_path, loss=loss)
    curve = review([tmp_path]).to_dict()["runs"][0]["curve"]
    assert len(curve["loss"]) == 400 and curve["loss"].count(None) == 1 and curve["steps"][-1] == 3000


def test_json_has_no_secrets(tmp_path: Path) -> None:
    token = "hf_" + "Ab3" * 10
    make_run(
        tmp_path, record={"status": "failed", "error": f"401 for {token}", "config": {"model": {"revision": token}}}
    )
    content = json.dumps(review([tmp_path]).to_dict())
    assert token not in content
    assert "401 for ***" in content


@pytest.mark.process
def test_the_package_imports_nothing_heavy(tmp_path: Path) -> None:
    """TensorBoard loads the package with the plugin. A review needs neither torch nor TensorFlow."""
    make_run(tmp_path)
    code = (
        "import sys; import finetune.review; assert not {'numpy', 'rich', 'tensorboard'} & sys.modules.keys();"
        "from pathlib import Path; from finetune.review.assemble import review;"
        f"review([Path({str(tmp_path)!r})]).to_dict();"
        "assert not {'torch', 'tensorflow', 'transformers', 'pandas'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
