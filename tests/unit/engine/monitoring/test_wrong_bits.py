"""Bits that change: on one rank of several, or in one of several passes over the same rows."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetune.engine.monitoring import wrong_bits
from tests.helpers import launch, tiny
from tests.helpers.runs import Runs, give_trainer_to, in_this_process

NAN = math.nan
DEVICES = [{"host": "one", "gpu": 0}, {"host": "one", "gpu": 1}, {"host": "two", "gpu": 0}]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ([[1, 2, NAN], [1, 2, NAN], [1, 2, NAN]], None),
        ([[NAN, NAN, NAN]] * 3, None),  # shards are each another
        (
            [[1, 2, NAN], [1, 3, NAN], [1, 2, NAN]],
            "Rank 1 (one, GPU 1) has other trained weights or optimizer states at",
        ),
        ([[1, 2, NAN], [1, 3, NAN]], "The ranks 0 (one, GPU 0), 1 (one, GPU 1) have other trained weights"),
        (
            [[1, 2, NAN], [1, 2, NAN], [1, 2, 7.0]],
            "Rank 2 (two, GPU 0) computed a pass of step 7 several times, and one",
        ),
    ],
)
def test_the_rank_is_named(fields: list[list[float]], expected: str | None) -> None:
    found = wrong_bits.verdict(fields, 40, DEVICES)
    assert found is None if expected is None else found is not None and found.startswith(expected)


def test_states_of_8_bits_count() -> None:
    """torchao's, which are made of several tensors."""
    state = pytest.importorskip("torchao.optim.subclass_8bit").OptimState8bit.zeros((16, 256))
    weight = torch.nn.Parameter(torch.zeros(16, 256))
    model = SimpleNamespace(parameters=lambda: [weight])
    optimizer = SimpleNamespace(state={weight: {"exp_avg": state}})
    checksum = wrong_bits.Checksum(SimpleNamespace(model=model, optimizer=optimizer))
    found = [checksum.halves()]
    for part in (state.codes, state.scale):
        part[0] = 1
        found.append(checksum.halves())
    assert len(set(found)) == 3


@pytest.mark.process
@pytest.mark.parametrize("kind", ["bit", pytest.param("state", marks=pytest.mark.campaign)])
def test_a_bit_that_changes_on_one_rank_ends_the_run(tmp_path: Path, tiny_model: Path, kind: str) -> None:
    """The checkpoint from before is there, and none from after it."""
    words = [
        *("--model.model_name_or_path", str(tiny_model), "--model.backend", "transformers"),
        *("--data.train_file", str(tiny.make_rows(tmp_path / "train.jsonl", 40)), "--logging.generate_samples", "0"),
        *("--training.global_batch_size", "4", "--training.max_steps", "8", "--training.save_steps", "2"),
        *("--logging.logging_steps", "2", "--training.output_dir", str(tmp_path / "out")),
    ]
    fault = {"FAULT": kind, "FAULT_RANK": "1", "FAULT_STEP": "4"}
    done = launch.run("2 ranks", words, cache=tmp_path, script=launch.SPIES / "fault.py", **fault)
    assert done.returncode == 1
    error = launch.read(tmp_path / "out")["error"]
    assert "have other trained weights or optimizer states at step 6" in error, error
    assert "Traceback" not in done.stdout
    assert sorted(one.name for one in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.parametrize("noise", ["none", "once", "always"])
def test_a_pass_that_gives_another_result_ends_the_run(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, noise: str
) -> None:
    """If it does so always, nothing can be concluded, and the run goes on."""
    (tmp_path / "model").symlink_to(tiny_model)
    tiny.make_rows(tmp_path / "train.jsonl", 12)
    calls: list[int] = []

    def disturb(module: Any, given: Any, output: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        wrong = noise == "always" or (noise == "once" and len(calls) == 2)
        return output * (1 + len(calls)) if wrong else output

    def watch(trainer: Any) -> None:
        trainer.model.get_output_embeddings().register_forward_hook(disturb)

    words = ["--training.max_steps", "2", "--logging.logging_steps", "1", "--data.packing", "false"]
    with in_this_process(monkeypatch, tmp_path):
        give_trainer_to(monkeypatch, watch)
        run = Runs(tmp_path, monkeypatch)
        found = run(tmp_path / "out", *words, code=int(noise == "once"))
    assert found["status"] == ("failed" if noise == "once" else "done")
    if noise == "once":
        assert " computed a pass of step 1 several times, and one result was another" in found["error"]
    assert len(calls) == {"none": 2 + 2, "once": 4 + 1, "always": 4 + 2}[noise]  # those of the check, then of steps
