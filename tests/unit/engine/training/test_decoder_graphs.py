"""Passes that are recorded and replayed, with a recorder that runs them again: a CPU has no graphs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from finetune.engine.kernels import attention
from finetune.engine.training import decoder_graphs
from finetune.engine.training.decoder_graphs import Boundaries, DecoderGraphs, FlatGradients
from finetune.errors import RunError
from finetune.measure import graphs, measurements
from tests.helpers import launch, tiny
from tests.helpers.runs import Runs, give_trainer_to, in_this_process
from tests.spies.recorded import RunsAgain

SECONDS = ("launched_seconds", "replayed_seconds")


def test_runs_with_recorded_passes_are_equal_to_the_last_bit(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accumulation, evaluations between steps, a checkpoint, and a run that goes on from it."""
    (tmp_path / "model").symlink_to(tiny_model)
    tiny.make_rows(tmp_path / "train.jsonl", 40)
    tiny.make_rows(tmp_path / "eval.jsonl", 6, seed=1)
    words = [
        *("--data.packing", "true", "--data.max_length", "128", "--data.pack_length", "200"),
        *("--data.eval_file", str(tmp_path / "eval.jsonl"), "--training.eval_steps", "2"),
        *("--training.per_device_train_batch_size", "2", "--training.max_steps", "6", "--training.save_steps", "3"),
        *("--training.per_device_eval_batch_size", "2"),  # that of the recording: sums of the same order
    ]
    trainers: list[Any] = []
    replayed: list[int] = []
    evaluated: list[int] = []
    with in_this_process(monkeypatch, tmp_path):
        run = Runs(tmp_path, monkeypatch)
        give_trainer_to(monkeypatch, trainers.append)
        launched = run(tmp_path / "launched", *words)
        assert launched["cuda_graphs"] == {**launched["cuda_graphs"], "used": False, "reason": "there is no GPU"}
        monkeypatch.setattr(decoder_graphs, "why_not", lambda trainer: None)
        monkeypatch.setattr(decoder_graphs, "CudaRecorder", RunsAgain)
        replay = DecoderGraphs.replay_backward

        def count(self: Any, gradient: torch.Tensor) -> None:
            replayed.append(1)
            replay(self, gradient)

        monkeypatch.setattr(DecoderGraphs, "replay_backward", count)
        forward = DecoderGraphs.replay_forward

        def count_evaluated(self: Any) -> torch.Tensor:
            evaluated.extend([1] * (not self._trainer.model.training))
            return forward(self)

        monkeypatch.setattr(DecoderGraphs, "replay_forward", count_evaluated)
        recorded = run(tmp_path / "recorded", *words, "--training.cuda_graphs", "true")
        checkpoint = ("--training.resume_from_checkpoint", str(tmp_path / "recorded" / "checkpoint-3"))
        resumed = run(tmp_path / "resumed", *words, *checkpoint, "--training.cuda_graphs", "true")
    assert recorded["cuda_graphs"]["used"] and recorded["cuda_graphs"]["difference"] == 0
    assert len(replayed) >= 12  # two passes of each step
    assert len(evaluated) >= 3  # those after steps; the last ends the run, without graphs
    assert recorded["losses"] == launched["losses"]
    assert resumed["cuda_graphs"]["used"] and resumed["losses"] == launched["losses"][3:]
    times = [{key: one["cuda_graphs"][key] for key in SECONDS} for one in (recorded, resumed)]
    assert times[0] == times[1] and all(times[0].values())  # found before, and not measured again
    assert recorded["eval_loss_after"] == launched["eval_loss_after"]
    histories = [[one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one] for trainer in trainers]
    assert histories[0] == histories[1] and len(histories[0]) >= 3
    weights = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("launched", "recorded", "resumed")]
    for name, expected in weights[0].items():
        assert all(torch.equal(one[name], expected) for one in weights[1:])
    assert trainers[1].graphs is None and "zero_grad" not in vars(trainers[1].model)  # as it was


class Forgets(RunsAgain):
    """A recorder whose backward pass adds nothing."""

    recorded = 0

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        return super().record(function if self.recorded == 1 else lambda: None)


class KeepsWeights(RunsAgain):
    """A recorder whose passes compute with the weights of the recording, as a graph does that reads a copy of them."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        weights = [one for one in KeepsWeights.trained if one.requires_grad]
        kept = [one.detach().clone() for one in weights]

        def replay() -> None:
            now = [one.detach().clone() for one in weights]
            for one, before in zip(weights, kept, strict=True):
                one.data.copy_(before)
            function()
            for one, after in zip(weights, now, strict=True):
                one.data.copy_(after)

        return super().record(replay)

    trained: ClassVar[list[torch.nn.Parameter]] = []


@pytest.mark.parametrize("recorder", [pytest.param(Forgets, marks=pytest.mark.campaign), KeepsWeights])
def test_a_recording_that_is_wrong_is_not_used(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, recorder: type[RunsAgain]
) -> None:
    """The run goes on with launched passes, as if nothing had been tried; also if an earlier one was right."""
    (tmp_path / "model").symlink_to(tiny_model)
    tiny.make_rows(tmp_path / "train.jsonl", 24)
    words = ["--data.packing", "true", "--data.max_length", "128", "--data.pack_length", "200"]
    words += ["--training.per_device_train_batch_size", "2", "--training.max_steps", "2"]
    with in_this_process(monkeypatch, tmp_path):
        run = Runs(tmp_path, monkeypatch)
        words += ["--training.cuda_graphs", "true"]
        monkeypatch.setattr(decoder_graphs, "why_not", lambda trainer: None)
        monkeypatch.setattr(decoder_graphs, "CudaRecorder", RunsAgain)
        right = run(tmp_path / "right", *words)
        monkeypatch.setattr(decoder_graphs, "CudaRecorder", recorder)
        give_trainer_to(monkeypatch, lambda trainer: KeepsWeights.trained.extend(trainer.model.parameters()))
        refused = run(tmp_path / "refused", *words)
    KeepsWeights.trained.clear()
    assert right["cuda_graphs"]["used"] and not refused["cuda_graphs"]["used"]
    assert "its results differ by" in refused["cuda_graphs"]["reason"], refused["cuda_graphs"]
    assert refused["losses"] == right["losses"]


@pytest.mark.parametrize("seconds", ["NaN", "-1", "1" + 400 * "0", 100_000 * "["])
def test_a_note_that_cannot_be_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: str) -> None:
    """Nor does a run end because there is no room for one."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    measurements.save_graphs({}, 0.25, 0.125)
    assert measurements.find_graphs({}) == {"launched_seconds": 0.25, "replayed_seconds": 0.125}
    (note,) = tmp_path.rglob("graphs-*.json")
    note.write_text(note.read_text().replace("0.25", seconds))
    assert measurements.find_graphs({}) is None
    note.unlink()
    os.mkfifo(note)
    measurements.save_graphs({}, 0.25, 0.125)
    assert measurements.find_graphs({}) is None


def test_noise_of_some_gradients_does_not_admit_errors_of_others() -> None:
    """A model may amplify the rounding of launched passes until four times their difference is all there is."""
    generator = torch.Generator().manual_seed(0)

    def results(noisy: float, exact: float, loss: float = 2.0, factor: float = 1.0) -> list[list[torch.Tensor]]:
        each = [torch.ones(50) + share * torch.randn(50, generator=generator) for share in (noisy, exact)]
        return [[torch.tensor(loss), torch.zeros(5), *(factor * one for one in each)] for _ in range(2)]

    expected = results(0.0, 0.0)

    def is_right(noise: float, *found: float, **further: float) -> bool:
        launched = graphs._squares(results(noise, 0.005), expected)
        stable = launched[..., 0] <= graphs.MOST_NOISE**2 * launched[..., 1]
        assert stable.tolist() == [[True, True, False, True]] * 2
        bounds = (graphs.OF_NOISE * graphs._differences(launched, stable)).clamp(min=graphs.LARGEST_DIFFERENCE)
        squares = graphs._squares(results(*found, **further), expected)
        return bool((graphs._differences(squares, stable) <= bounds).all())

    assert is_right(0.1, 0.1, 0.005) and is_right(1.0, 1.5, 0.005)
    assert not is_right(1.0, 1.0, 0.3)  # the gradients that repeat
    assert not is_right(0.1, 2.0, 0.005) and not is_right(0.1, 0.1, 0.005, factor=2.0)  # all of them
    assert not is_right(1.0, 1.0, 0.005, loss=2.2) and not is_right(1.0, float("nan"), 0.005)


@pytest.mark.process
def test_two_ranks_with_recorded_passes_train_as_with_ddp(tmp_path: Path, tiny_model: Path) -> None:
    """The sums of gradients, and the adapter of rank 0 on both."""
    words = [
        *("--model.model_name_or_path", str(tiny_model), "--model.backend", "transformers"),
        *("--data.train_file", str(tiny.make_rows(tmp_path / "train.jsonl", 40)), "--data.packing"),
        *("--data.max_length", "128", "--data.pack_length", "200", "--training.global_batch_size", "4"),
        *("--training.max_steps", "4", "--logging.logging_steps", "1", "--logging.generate_samples", "0"),
        *("--training.per_device_train_batch_size", "1", "--training.cuda_graphs", "true"),
    ]
    script = launch.SPIES / "recorded.py"
    recorded = launch.train("2 ranks", words, out=tmp_path / "recorded", cache=tmp_path, script=script)
    launched = launch.train("2 ranks", words, out=tmp_path / "launched", cache=tmp_path)
    assert recorded["cuda_graphs"]["used"], recorded["cuda_graphs"]
    assert not launched["cuda_graphs"]["used"]
    assert recorded["losses"] == launched["losses"]
    assert 0 < recorded["exposed_communication_fraction"] < 1
    weights = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("launched", "recorded")]
    assert all(torch.equal(weights[1][name], expected) for name, expected in weights[0].items())


def test_boundaries_of_documents_that_are_not_there_are_empty() -> None:
    """A micro-batch with more documents than any of the layout, or with a longer one, is launched instead."""

    def given(*lengths: int) -> dict[str, Any]:
        return attention.batch_arguments(torch.tensor(lengths, dtype=torch.int32), torch.device("cpu"))

    boundaries = Boundaries(4, 30, given(20, 12, 8), torch.device("cpu"))
    bounds = boundaries.arguments["cu_seq_lens_q"]
    assert bounds.tolist() == [0, 30, 40, 40, 40] and boundaries.arguments["max_length_k"] == 30
    assert boundaries.fill(given(8, 30, 2)) and bounds.tolist() == [0, 8, 38, 40, 40]
    assert not boundaries.fill(given(31, 9)) and not boundaries.fill(given(*[8] * 5))


def test_gradients_are_parts_of_one_tensor() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2, dtype=torch.bfloat16))
    model[0].bias.requires_grad_(False)
    gradients = FlatGradients(model.parameters())
    model[1](model[0](torch.ones(2, 3)).bfloat16()).sum().backward()
    expected = [one.grad.clone() for one in gradients.parameters]
    whole = {dtype: tensor for (dtype, _), tensor in gradients.tensors.items()}
    assert set(whole) == {torch.float32, torch.bfloat16} and all(one.abs().sum() > 0 for one in expected)
    for one, kept in zip(gradients.parameters, expected, strict=True):
        assert one.grad is not None and torch.equal(one.grad, kept)
        assert one.grad.untyped_storage().data_ptr() == whole[one.dtype].untyped_storage().data_ptr()
    gradients.zero()
    assert not any(one.grad.any() for one in gradients.parameters)
    gradients.check()
    for replace in ("data", "grad"):
        kept = getattr(model[1].weight, replace)
        setattr(model[1].weight, replace, kept.clone())
        with pytest.raises(RunError, match="Set training.cuda_graphs: false"):
            gradients.check()
        setattr(model[1].weight, replace, kept)
    gradients.check()
