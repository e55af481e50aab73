"""What a run reports while it trains: answers and their scores, trackers, and the user's own metric and callbacks."""

from __future__ import annotations

import inspect
import json
import os
import re
import sqlite3
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers.integrations import integration_utils

from finetune import train
from finetune.config import ConfigError, dump_yaml, load
from finetune.config.rules import TRACKERS
from finetune.data.store import Rows
from finetune.engine.monitoring import samples, trackers
from finetune.engine.preflight import config_checks
from finetune.errors import RunError, UserError
from finetune.runtime import user_code
from finetune.runtime.ranks import distributed
from finetune.runtime.tags import BY_NAME, tag
from tests.helpers import launch, tiny
from tests.helpers.runs import in_this_process

CODE = """
import os
from transformers import TrainerCallback

def words(answers, references):
    with open("asked.txt", "a") as file:
        file.write(f"{os.environ.get('RANK', 0)} {len(answers)} {len(references)}\\n")
    return {"words": sum(len(answer.split()) for answer in answers) / len(answers), "my_loss": 1}

def length(answers, references):
    return max(len(reference) for reference in references)

def wrong(answers, references):
    return answers[len(references)]

def text(answers, references):
    return "good"

def names(answers, references):
    return {"a (b)": 1.0}

class Count(TrainerCallback):
    steps = 0
    logged = []
    def on_step_end(self, args, state, control, **kwargs):
        type(self).steps += 1
    def on_log(self, args, state, control, logs=None, **kwargs):
        type(self).logged.append(dict(logs))

class Broken(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise KeyError("no such key")

class NotOne:
    pass

number = 7
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of the user's in the working directory."""
    (tmp_path / "own_code.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    user_code.load("logging.metric", "own_code:words", None)
    return sys.modules["own_code"]


def settings(tmp_path: Path, model: Path, *extra: str) -> list[str]:
    """A run of 4 steps that evaluates after 2 and 4, and logs after 2 and 4."""
    given = ["--model.model_name_or_path", str(model), "--model.backend", "transformers", "--data.num_proc", "1"]
    given += ["--data.train_file", str(tiny.make_rows(tmp_path / "train.jsonl", 16))]
    given += ["--data.eval_file", str(tiny.make_rows(tmp_path / "eval.jsonl", 5, seed=1, longest=8))]
    given += ["--training.output_dir", str(tmp_path / "out"), "--training.global_batch_size", "4"]
    return [*given, "--training.max_steps", "4", "--training.eval_steps", "2", "--logging.logging_steps", "2", *extra]


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def call(*extra: str) -> int:
        with in_this_process(monkeypatch, tmp_path):
            return train.main(settings(tmp_path, tiny_model, *extra))

    return call


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a run."""
    (events,) = {file.parent for file in folder.rglob("events.*")}
    found = EventAccumulator(str(events), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return {one: [(event.step, event.value) for event in found.Scalars(one)] for one in found.Tags()["scalars"]}


# --- answers while training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("", True),
        (" \n", True),
        (".......", True),
        ("CLARA" * 15, True),
        ("It is. I am a cat. I am a cat. I am a cat. I am a", True),
        ("a" * 40, True),
        ("42", False),
        ("ha ha ha", False),  # short
        ("He said no, no, no, no, no, no, no, and then he left the room.", False),  # it goes on
        ("The list of the colors in the long row of his many houses: red, red, red, red, red", False),  # less than half
        ("one two three four one two three four", False),  # twice
        ("\u597d\u7684\u5427", False),
    ],
)
def test_an_answer_is_broken_if_it_is_empty_or_repeats(text: str, broken: bool) -> None:
    assert samples.is_broken(text) == broken
    result = samples.SampleResult(answers=[text, "42"], shown=[("", text, "right"), ("", "42", "1")], scores={})
    assert result.broken == broken / 2
    same = samples.SampleResult(answers=[text], shown=[("", text, text)], scores={})
    assert same.broken == 0  # as it should be


def test_scores_are_in_tensorboard_in_the_terminal_in_run_json_and_in_the_log(
    run: Callable[..., int], code: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At every evaluation, with the number of answers beside them; once for the same weights."""
    metric = ("--logging.metric", "own_code:words", "--logging.trust_code", "--logging.callbacks", "[own_code:Count]")
    assert run(*metric) == 0
    record, shown, printed = (
        json.loads((tmp_path / "out/run.json").read_text()),
        curves(tmp_path),
        capsys.readouterr().out,
    )
    scores = [one["scores"] for one in record["evaluations"]]
    assert [one["step"] for one in record["evaluations"]] == [0, 2, 4]
    assert {one["answers"] for one in record["evaluations"]} == {3} and record["answers_scored"] == 3
    for name, label in (("eval_exact_match", ""), ("eval_metric", "words"), ("eval_metric", "my_loss")):
        expected = {step: one[label or "exact_match"] for step, one in zip((0, 2, 4), scores, strict=True)}
        assert dict(shown[tag(name, label=label)]) == pytest.approx(expected)
    assert shown[tag("eval_answers")] == [(0, 3.0), (2, 3.0), (4, 3.0)]
    assert record["metric_after"] == {name: scores[-1][name] for name in ("words", "my_loss")}
    assert record["exact_match_before"] == scores[0]["exact_match"]
    line = f"step 2/4: held-out answers: exact match {scores[1]['exact_match']:.4g}, words {scores[1]['words']:.4g}"
    assert f"{line}, my_loss 1 (3 answers)\n" in printed and "my_loss 1.0000 -> 1.0000 (3 answers)" in printed
    assert (tmp_path / "asked.txt").read_text() == "0 3 3\n" * 4
    assert code.Count.steps == 4
    logged = [one for one in code.Count.logged if "eval_answers" in one]
    assert [one["eval_words"] for one in logged] == [one["words"] for one in scores]


class Tokenizer:
    """Ids as text; 9 is special."""

    added_tokens_decoder = {9: "<end>"}

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return " ".join(str(one) for one in ids if one != 9)


def test_an_answer_ends_where_training_ends_a_turn() -> None:
    """The token that ends the supervised part is a stop token if it is a special one, whatever the model's are."""

    class Two(Rows):
        def __init__(self) -> None:
            pass

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            last = (9, 4)[index]
            return np.array([1, 2, 3, last]), np.array([-100, -100, 3, last])

    found = samples.questions(Two(), Tokenizer(), 2)
    assert [one.end for one in found] == [9, None]
    assert found[0].asked == "1 2"  # without a chat template, the whole prompt


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wrong", r"own_code:wrong failed at own_code\.py:\d+: IndexError: list index out of range\. Correct it"),
        ("text", r"own_code:text returned a str as text\. Return a number, or a dict of numbers\."),
        ("names", r"own_code:names returned a value named 'a \(b\)'\. Names are"),
    ],
)
def test_a_metric_that_fails_ends_the_run_with_one_sentence(
    run: Callable[..., int], code: Any, name: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--logging.metric", f"own_code:{name}", "--logging.trust_code") == 1
    printed = capsys.readouterr().err
    assert re.search(f"^error: logging.metric: {expected}", printed, re.MULTILINE), printed
    assert "Traceback" not in printed
    assert json.loads((tmp_path / "out/run.json").read_text())["status"] == "failed"


def test_a_number_has_the_name_of_the_function() -> None:
    metric = samples.Metric(name="package.module:score", function=lambda answers, references: 0.5)
    assert samples.score_on_main(metric, ["a"], ["b"]) == {"score": 0.5}


@pytest.mark.process
@pytest.mark.campaign
def test_two_ranks_score_once_and_fail_together(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "own_code.py").write_text(CODE)
    arguments = [*settings(tmp_path, tiny_model)[:-2], "--logging.trust_code", "--logging.metric"]
    own = ("--logging.callbacks", "[own_code:Count]")
    record = launch.train("2 ranks", [*arguments, "own_code:words", *own], out=tmp_path / "two", cache=tmp_path)
    assert record["world_size"] == 2 and record["answers_scored"] == 3
    assert (tmp_path / "asked.txt").read_text() == "0 3 3\n" * 4  # on rank 0, with the answers of both
    done = launch.run("2 ranks", [*arguments, "own_code:wrong", "--training.output_dir", "bad"], cache=tmp_path)
    assert done.returncode == 1
    assert done.stdout.count("own_code:wrong failed") == 1 and "Traceback" not in done.stdout, done.stdout[-3000:]


# --- code that a configuration names ----------------------------------------------------------------------------------

ROWS = ("--model.model_name_or_path", "m", "--data.train_file", "t.jsonl", "--data.eval_file", "e.jsonl")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--logging.metric", "a:b"), "names Python code.* Set logging.trust_code: true to allow it, or remove it"),
        (("--logging.callbacks", "[a:B]"), "names Python code.* Set logging.trust_code: true"),
        (("--logging.metric", "a.b", "--logging.trust_code"), "'a.b' must be of the form package.module:function"),
        (("--logging.callbacks", "[a:b:c]", "--logging.trust_code"), "must be of the form package.module:Class"),
        (("--logging.trust_code",), "no effect without logging.metric or logging.callbacks"),
        (
            ("--logging.metric", "a:b", "--logging.trust_code", "--logging.generate_samples", "0"),
            "generate_samples is 0. Set logging.generate_samples",
        ),
        (("--logging.metric", "a:b", "--logging.trust_code", "--data.eval_file", "null"), "no rows are held out"),
        (("--logging.report_to", "[none, wanb]"), "unknown: wanb. Nearest is wandb. Use tensorboard, wandb"),
        (("--logging.report_to", "[wandb, all]"), "must name each service"),
    ],
)
def test_the_configuration_refuses(arguments: tuple[str, ...], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([*ROWS, *arguments])
    assert len(caught.value.problems) == 1 and re.search(expected, caught.value.problems[0])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("own_code:wods", "own_code has no wods. Nearest is words."),
        ("own_code:number", "it is a int, and cannot be called"),
        ("own_code.deeper:f", "there is no module own_code.deeper here"),
        ("nowhere_at_all:f", "there is no module nowhere_at_all here. Install it, put it into the working directory"),
        ("own_broken:f", r"importing it fails \(NameError: name 'nothing' is not defined\). Correct own_broken"),
        ("own_needs:f", "importing it fails .*nowhere_at_all.*Install what it needs"),
    ],
)
def test_code_that_is_not_there(code: Any, tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / "own_broken.py").write_text("nothing\n")
    (tmp_path / "own_needs.py").write_text("import nowhere_at_all\n")
    with pytest.raises(UserError, match=f"^logging.metric is {name}: .*{expected}"):
        user_code.load("logging.metric", name, None)


def test_code_is_found_beside_the_configuration_and_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    monkeypatch.setattr("sys.path", list(sys.path))
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "beside_code.py").write_text("def f(answers, references): return 1\n")
    assert user_code.load("logging.metric", "beside_code:f", str(folder / "run.yaml"))([], []) == 1
    # A resumed run has its own run.yaml, also if it was resumed before.
    (folder / "later_code.py").write_text("def f(answers, references): return 2\n")
    first = load([*ROWS])
    for name, source in (("run.yaml", folder / "my.yaml"), ("again.yaml", tmp_path / "run.yaml")):
        (tmp_path / name).write_text(dump_yaml(replace(first, config_file=str(source))))
    monkeypatch.setattr("sys.path", [one for one in sys.path if one != str(folder)])
    assert user_code.load("logging.metric", "later_code:f", str(tmp_path / "again.yaml"))([], []) == 2
    with pytest.raises(UserError, match=f"or next to {folder}/my.yaml, or correct"):
        user_code.check("logging.metric", "nowhere_at_all:f", str(tmp_path / "again.yaml"))
    code = ("--logging.metric", "nowhere_at_all:f", "--logging.trust_code")
    with pytest.raises(UserError, match="^logging.metric is nowhere_at_all:f: there is no module"):
        config_checks.check(load(settings(tmp_path, tiny_model, *code)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Broken", r"own_code:Broken failed in on_step_end at own_code\.py:\d+: KeyError: 'no such key'"),
        ("NotOne", "own_code:NotOne is not a class of transformers.TrainerCallback"),
    ],
)
def test_a_callback_that_fails(run: Callable[..., int], code: Any, name: str, expected: str, capsys: Any) -> None:
    assert run("--logging.callbacks", f"[own_code:{name}]", "--logging.trust_code") in (1, 2)
    printed = capsys.readouterr().err
    assert re.search(f"^error: logging.callbacks: {expected}", printed, re.MULTILINE) and "Traceback" not in printed


# --- trackers ---------------------------------------------------------------------------------------------------------


class StandIn(transformers.TrainerCallback):
    """A tracker with the interface of transformers' own. It keeps what it is told."""

    calls: list[tuple[Any, ...]] = []
    fails_at: str = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.note("begin", args.run_name)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.note("log", state.global_step, integration_utils.rewrite_logs(logs))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.note("end")

    def note(self, *call: Any) -> None:
        if self.fails_at and self.fails_at == f"{call[0]} {call[1] if len(call) > 1 else ''}".strip():
            raise ConnectionError("no route to the service")
        self.calls.append(call)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    """In place of wandb, which then counts as installed."""
    kind = type("Own", (StandIn,), {"calls": []})
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "wandb", kind)
    monkeypatch.setitem(TRACKERS, "wandb", ("json", "wandb"))
    return kind


def test_a_tracker_gets_what_tensorboard_shows_under_the_names_of_trl(
    run: Callable[..., int], stand_in: type[StandIn], tmp_path: Path
) -> None:
    assert run("--logging.report_to", "[tensorboard, wandb]") == 0
    shown, calls = curves(tmp_path), stand_in.calls
    assert [call[0] for call in calls].count("end") == 1 and calls[-1] == ("end",)
    assert ("begin", "out") in calls
    logged: dict[str, list[tuple[int, float]]] = {}
    for _, step, values in (call for call in calls if call[0] == "log"):
        for name, value in values.items():
            logged.setdefault(name, []).append((step, value))
    losses = json.loads((tmp_path / "out/run.json").read_text())["losses"]
    assert dict(logged["train/loss"]) == pytest.approx({2: sum(losses[:2]) / 2, 4: sum(losses[2:]) / 2}, rel=1e-5)
    assert "train/token_accuracy" not in logged and "eval/token_accuracy" not in logged
    for name in ("eval_loss", "eval_token_accuracy", "eval_entropy", "eval_perplexity", "eval_exact_match"):
        key = BY_NAME[name].key.replace("eval_", "eval/", 1)
        assert dict(logged[key]) == pytest.approx(dict(shown[tag(name)])), key
    for name in ("tokens_seen", "tokens_per_gpu", "step_seconds", "padding", "forward", "clipped", "hours"):
        assert dict(logged[f"train/{BY_NAME[name].key}"]) == pytest.approx(dict(shown[tag(name)])), name
    assert {"train/grad_norm", "train/learning_rate", "train/num_tokens", "eval/mean_token_accuracy"} <= set(logged)


@pytest.mark.parametrize("name", ["mlflow", "dvclive", "azure_ml", "dagshub"])
def test_the_names_are_the_same_where_the_callback_of_transformers_adds_no_prefix(name: str) -> None:
    """Those callbacks show what they get; the others would write train/train/loss."""
    shown: list[dict[str, float]] = []

    class Plain(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            shown.append(logs)

    callback = Plain()
    tracker = trackers.Tracker(name, callback, {"eval_loss": 3.0, "eval_exact_match": 0.5})
    callback.on_log(None, None, None, logs={"eval_loss": 3.0})
    tracker.end()
    assert shown == [{"eval/loss": 3.0, "eval/exact_match": 0.5}]
    tracker = trackers.Tracker(name, callback, {})
    callback.on_log(None, None, None, logs={"loss": 2.0, "grad_norm": 1.0})
    tracker.end()
    assert shown[1:] == [{"train/loss": 2.0, "train/grad_norm": 1.0}]
    own = inspect.getsource(integration_utils.INTEGRATION_TO_CALLBACK[name].on_log)
    assert "rewrite_logs" not in own  # else the prefix would come twice


def test_nothing_is_reported_without_being_asked(run: Callable[..., int], stand_in: type[StandIn]) -> None:
    assert run("--logging.generate_samples", "0") == 0
    assert stand_in.calls == []


def test_only_rank_0_reports(stand_in: type[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    assert [type(one) for one in trackers.tracker_callbacks(["wandb"])] == [stand_in]
    second = distributed.Ranks(rank=1, local_rank=1, world_size=2, local_world_size=2)
    monkeypatch.setattr(distributed, "ranks", lambda: second)
    assert trackers.tracker_callbacks(["wandb"]) == []


def test_a_tracker_that_is_not_installed_is_refused_with_the_pip_line(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(UserError, match=r"names neptune, comet_ml, which .* Run `pip install neptune comet-ml`, or"):
        config_checks.check_trackers(["neptune", "comet_ml"])


def test_a_tracker_that_cannot_begin_ends_the_run(
    run: Callable[..., int], stand_in: type[StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in.fails_at = "log 0"  # the evaluation before training
    assert run("--logging.report_to", "wandb") == 1
    printed = capsys.readouterr().err
    assert "error: logging.report_to: wandb cannot be used here: ConnectionError: no route" in printed
    assert "Traceback" not in printed


def test_a_tracker_that_fails_later_costs_its_figures_alone(
    run: Callable[..., int], stand_in: type[StandIn], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in.fails_at = "log 4"
    assert run("--logging.report_to", "wandb") == 0
    assert capsys.readouterr().err.count("warning: wandb failed (ConnectionError: no route to the service)") == 1
    assert [call[1] for call in stand_in.calls if call[0] == "log"] == [0, 0, 2, 2, 2]
    assert json.loads((tmp_path / "out/run.json").read_text())["status"] == "done"


def test_the_table_knows_only_trackers_of_transformers() -> None:
    assert set(TRACKERS) <= set(integration_utils.INTEGRATION_TO_CALLBACK)
    with pytest.raises(RunError, match="^logging.report_to: swanlab cannot be used here: .*pip install swanlab"):
        trackers.tracker_callbacks(["swanlab"])


def test_statistics_of_the_services_are_off_unless_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY", raising=False)
    monkeypatch.setenv("DO_NOT_TRACK", "0")
    trackers.disable_telemetry()
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true" and os.environ["DO_NOT_TRACK"] == "0"


@pytest.mark.process
@pytest.mark.filterwarnings("default")
def test_wandb_offline(run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    assert run("--logging.report_to", "wandb") == 0
    wandb.teardown()  # as at the end of a process: its own process has written everything
    (file,) = tmp_path.rglob("*.wandb")
    assert all(name in file.read_bytes() for name in (b"train/loss", b"eval/loss", b"train/num_tokens"))


@pytest.mark.filterwarnings("default")
def test_mlflow_in_a_local_store(run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    assert run("--logging.report_to", "mlflow") == 0
    found = sqlite3.connect(tmp_path / "runs.db")
    assert found.execute("select status from runs").fetchall() == [("FINISHED",)]
    steps = found.execute("select key, step from metrics where key like '%loss' order by 1, 2").fetchall()
    assert {("eval/loss", 0), ("eval/loss", 2), ("eval/loss", 4), ("train/loss", 2), ("train/loss", 4)} <= set(steps)
    assert all(key.startswith(("train/", "eval/")) for key, _ in steps)


@pytest.mark.filterwarnings("default")
def test_trackio_on_this_machine(run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    assert run("--logging.report_to", "trackio") == 0
    (file,) = (tmp_path / "trackio").glob("*.db")
    rows = [json.loads(row[0]) for row in sqlite3.connect(file).execute("select metrics from metrics")]
    assert [row["train/global_step"] for row in rows if "train/loss" in row] == [2, 4]
    assert {row["train/global_step"] for row in rows if "eval/loss" in row} == {0, 2, 4}
