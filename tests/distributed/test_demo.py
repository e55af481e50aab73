"""The demos, as `make demo` and `make demo-pretrained` run them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.quality import models
from finetune.errors import RunError
from tests.helpers import ROOT, launch

pytestmark = pytest.mark.process


@pytest.mark.campaign
def test_the_demo_learns_its_task(tmp_path: Path) -> None:
    """At least 0.9 of the held-out prompts are answered exactly."""
    done = launch.run("accelerate", ["--demo"], cache=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:]
    run = launch.read(tmp_path / "outputs" / "demo")
    assert run["exact_match_before"] < 0.1
    assert run["exact_match_after"] >= 0.9


@pytest.mark.timeout(1800)  # 4 to 10 minutes on a busy machine
@pytest.mark.campaign
def test_the_pretrained_demo_learns_its_task(tmp_path: Path) -> None:
    try:
        model = models.build(tmp_path / "models", "smollm2")
    except RunError as error:
        pytest.skip(f"the pretrained model cannot be had: {error}")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    arguments = ["--config", "examples/pretrained/smollm2.yaml", "--model.model_name_or_path", str(model)]
    arguments += ["--logging.generate_samples", "12", "--training.output_dir", str(tmp_path / "out")]
    done = launch.run("accelerate", arguments, cache=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:]
    run = launch.read(tmp_path / "out")
    assert run["eval_loss_after"] < run["eval_loss_before"] / 5
    assert run["exact_match_before"] == 0
    assert run["exact_match_after"] >= 0.5


def test_the_demo_explains_itself_and_takes_overrides_and_two_ranks(tmp_path: Path) -> None:
    arguments = ["--training.max_steps", "4", "--training.global_batch_size", "16", "--logging.generate_samples", "4"]
    out = ["--training.output_dir", str(tmp_path / "out")]
    done = launch.run("2 ranks", ["--demo", *arguments, *out], cache=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:]
    run = launch.read(tmp_path / "out")
    assert (run["steps"], run["batch"]["global_batch_size"], run["world_size"]) == (4, 16, 2)
    assert run["eval_loss_after"] < run["eval_loss_before"]
    for words in ("This is the demo", "finetune train my.yaml", "after training"):
        assert words in done.stdout
    events = EventAccumulator(str(tmp_path / "out" / "runs" / "out"))
    events.Reload()
    tags = events.Tags()
    for tag in (
        "1 learning/loss [nats]",
        "1 learning/eval loss [nats]",
        "2 health/gradient norm",
        "2 health/learning rate",
        "3 speed/tokens seen",
        "3 speed/tokens per device [1/s]",
        "4 step/forward [s]",
        "6 memory/peak of rank 0 [GiB]",
    ):
        assert tag in tags["scalars"], tag
    losses = [event.value for event in events.Scalars("1 learning/loss [nats]")]
    assert losses == pytest.approx(run["losses"])
    pages = {"1 data", "4 samples"}
    assert {f"{page}/text_summary" for page in pages} <= set(tags["tensors"])
