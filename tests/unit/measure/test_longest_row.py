"""How the longest row is measured, and that a run with `auto` takes the fastest mode that holds it."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.config.rules import Mode
from finetune.data.layout import lay_out
from finetune.engine.job import model_size
from finetune.engine.monitoring.metrics import ModelSize, training_flops
from finetune.engine.training.loss import StepStatistics
from finetune.measure import held, longest_row, probe, subprocess_dry_run, trial
from finetune.runtime.ranks.context_group import ALONE
from tests.helpers import tiny
from tests.helpers.runs import Runs, in_this_process

MIB = 2**20
SIZE = ModelSize(
    parameters=10**9,
    active_parameters=10**9,
    matmul_parameters=10**9,
    trainable_parameters=10**6,
    active_trainable_parameters=10**6,
    layers=16,
    hidden=2048,
    attention=2048,
)
# KiB per token, by mode.
NEEDS = {
    (False, False): 4096,
    ("selective", False): 512,
    (True, False): 256,
    ("offload", False): 192,
    ("offload", True): 128,
}
HELD = 100 * MIB


class Device:
    """A device on which a model holds HELD, and a pass as much per token as its mode needs. `seen` has the tokens of
    each pass by mode."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: float, *, real: bool = False) -> None:
        self.limit_bytes: float | None = limit
        self.mode: tuple[Any, bool] = (True, False)
        self.seen: list[tuple[Any, bool, int]] = []
        self.in_bfloat16: set[bool] = set()
        self.now = self.peak = float(HELD)

        def switch(trainer: Any, mode: Mode) -> None:
            self.mode = (mode.gradient_checkpointing, mode.tiled_mlp)
            if real:
                apply(trainer, mode)

        apply = longest_row.apply
        monkeypatch.setattr(probe.gc, "collect", lambda: 0)  # after each pass it takes longer than the pass
        monkeypatch.setattr(longest_row, "apply", switch)

    def reset(self) -> None:
        self.peak = HELD

    def peak_bytes(self) -> float:
        return self.peak

    def take(self, tokens: int) -> None:
        self.seen.append((*self.mode, tokens))
        needed = HELD + NEEDS[self.mode] * 1024 * tokens
        if needed > 1.25 * (self.limit_bytes or 0):
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.peak = max(self.peak, needed)


class FakeTrainer:
    """As much of a trainer as a pass uses."""

    sharded = False
    optimizer = None
    context = ALONE

    def __init__(self, device: Device) -> None:
        self.device = device
        self.model = self.model_wrapped = torch.nn.Linear(2, 1)
        self.model.requires_grad_(False)
        self.model.get_input_embeddings = lambda: self.model  # type: ignore[assignment]
        self.model.config = types.SimpleNamespace(  # type: ignore[assignment]
            get_text_config=lambda: types.SimpleNamespace(model_type="llama")
        )
        self.args = types.SimpleNamespace(device=torch.device("cpu"), optim="adamw_torch")
        self.accelerator = types.SimpleNamespace(ddp_handler=None)
        self.statistics, self.weights = StepStatistics(), "float32"

    def collate_rows(self, rows: list, pack_length: int | None = None) -> dict[str, Any]:
        ((ids, labels),) = rows[0]
        assert pack_length == len(ids) == len(labels)  # a pack of one document
        return {"input_ids": torch.from_numpy(ids)[None]}

    def training_step(self, model: Any, inputs: dict[str, Any], count: Any) -> None:
        self.device.take(inputs["input_ids"].numel())


def layout() -> Any:
    import numpy as np

    ids = np.arange(4000, dtype=np.int32)

    class Rows(list):
        lengths = np.array([4000, 20], dtype=np.int32)
        label_tokens = np.array([4000, 20])

    return lay_out(Rows([(ids, ids), (ids[:20], ids[:20])]), 4096, seed=0, fingerprint="")  # type: ignore[arg-type]


def test_two_lengths_are_tried_and_memory_is_never_filled_to_find_the_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = 20 * 1024 * MIB
    device = Device(monkeypatch, limit)
    trainer: Any = FakeTrainer(device)
    few = {mode: NEEDS[mode] for mode in ((False, False), ("offload", True))}
    modes = [Mode(gradient_checkpointing=kind, tiled_mlp=tiled) for kind, tiled in few]
    found = longest_row.measure(trainer, layout(), SIZE, modes, device)
    for one, (mode, need) in zip(found, few.items(), strict=True):
        short, long = one.points
        assert short.tokens == longest_row.SHORT_TOKENS and one.held_bytes == HELD
        assert long.peak_bytes <= HELD + longest_row.ROOM * limit
        assert one.line is not None and one.line.bytes_per_token == pytest.approx(1024 * need)
        assert one.line.longest(limit) == pytest.approx((limit - HELD) / (1024 * need), rel=1e-4)
        assert [tokens for *which, tokens in device.seen if tuple(which) == mode] == [short.tokens] * 2 + [
            long.tokens
        ] * 2


def test_a_mode_that_cannot_hold_the_shortest_row_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, 2048 * MIB)
    trainer: Any = FakeTrainer(device)
    none, some = longest_row.measure(
        trainer, layout(), SIZE, [Mode(gradient_checkpointing=kind, tiled_mlp=False) for kind in (False, True)], device
    )
    assert none.points == () and none.line is None and len(some.points) == 2
    # The ranks of a sharded model would wait for one that has run out of memory.
    trainer.sharded = True
    device.seen.clear()
    (none,) = longest_row.measure(
        trainer, layout(), SIZE, [Mode(gradient_checkpointing=False, tiled_mlp=False)], device
    )
    assert device.seen == [(False, False, longest_row.PROBE_TOKENS)] * 2 and len(none.points) == 1


def test_unsloths_length_of_rows_is_raised_for_a_pass_only() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    model.max_seq_length = 512  # type: ignore[assignment]
    with probe._unsloth_length(model, 4096):
        assert model.max_seq_length == 4096
    assert model.max_seq_length == 512


# --- in a run -------------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    """Runs of two steps of 8 rows."""
    tiny.make_model(tmp_path / "model", hidden=16, layers=1)
    tiny.make_rows(tmp_path / "train.jsonl", 16, longest=8)
    with in_this_process(monkeypatch, tmp_path):
        yield Runs(tmp_path, monkeypatch)


STEPS = ("--training.global_batch_size", "8", "--training.max_steps", "2", "--training.save_steps", "1")
AUTO = ("--training.gradient_checkpointing", "auto", "--training.per_device_train_batch_size", "8")
AUTO += ("--model.dtype", "bfloat16")


def test_a_run_takes_the_fastest_mode_that_holds_its_rows_and_keeps_it(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = runs(tmp_path / "cpu", *STEPS, *AUTO)
    assert plain["activations"]["gradient_checkpointing"] is True and not plain["activations"]["tiled_mlp"]
    assert plain["config"]["training"]["gradient_checkpointing"] is True
    said = " ".join(capsys.readouterr().out.split())
    assert "Chosen by auto: training.gradient_checkpointing: true, as on any CPU" in said

    device = on_a_device(runs, limit=170 * MIB)  # of the modes, the last two hold a micro-batch of 8 rows
    out = tmp_path / "auto"
    found = runs(out, *STEPS, *AUTO)
    assert found["losses"] == plain["losses"]  # nothing is left of the passes
    assert found["activations"]["gradient_checkpointing"] == "offload" and found["activations"]["tiled_mlp"] is False
    assert found["config"]["training"]["gradient_checkpointing"] == "offload"
    assert "gradient_checkpointing: offload\n" in (out / "run.yaml").read_text()
    said = " ".join(capsys.readouterr().out.split())
    assert "Chosen by auto: training.gradient_checkpointing: offload, the fastest that holds" in said
    assert {tuple(which) for *which, _ in device.seen} == set(NEEDS)
    assert device.in_bfloat16 == {True}  # before the first step nothing but the trainer sees to that

    device.seen.clear()
    again = runs(tmp_path / "again", *STEPS, *AUTO)
    assert not device.seen and again["activations"]["reason"].endswith("by an earlier measurement")
    assert again["losses"] == plain["losses"]

    for file in (tmp_path / "cache" / "measurements").glob("modes-*.json"):
        file.unlink()
    resume = ("--training.resume_from_checkpoint", str(out / "checkpoint-1"))
    resumed = runs(tmp_path / "resumed", *STEPS, *AUTO, *resume)
    assert not device.seen and resumed["activations"]["reason"] == "as in the checkpoint"
    assert resumed["activations"]["gradient_checkpointing"] == "offload"


def test_rows_that_no_mode_holds_are_refused_before_the_first_step(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_device(runs, limit=108 * MIB)
    found = runs(tmp_path / "full", *STEPS, *AUTO, code=1)
    assert found["status"] == "failed" and "does not fit this GPU" in found["error"]
    assert "training.context_parallel: 8 on 8 GPUs" in found["error"]


def on_a_device(runs: Runs, limit: float) -> Device:
    """From now on there is a device with this limit, whose modes are the faster, the more they need."""
    device = Device(runs.monkeypatch, limit, real=True)
    real = probe.run_passes

    def run_passes(trainer: Any, batch: Any, labels: int, memory: Any, passes: int) -> Any:
        tokens = batch["input_ids"].numel()
        with trainer.compute_loss_context_manager():
            device.in_bfloat16.add(torch.is_autocast_enabled("cpu"))
        real(trainer, {name: value[..., :8] for name, value in batch.items()}, labels, device, 1)
        try:
            device.take(tokens)
        except torch.OutOfMemoryError:
            return None
        size = model_size(trainer.model)
        operations = training_flops(size, tokens=tokens, squared_lengths=tokens**2)
        seconds = operations / (1e9 + 1e6 * NEEDS[device.mode])
        return probe.Passes(peak_bytes=device.peak, seconds=seconds, first_seconds=1)

    runs.monkeypatch.setattr(probe, "run_passes", run_passes)
    runs.monkeypatch.setattr(held, "Memory", lambda name: device)
    runs.monkeypatch.setattr(held, "bytes_not_yet_allocated", lambda trainer: 0.0)
    runs.monkeypatch.setattr(longest_row, "SHORT_TOKENS", 16)
    return device


# --- in a dry run ---------------------------------------------------------------------------------------------------


def dry_run(runs: Runs, *arguments: str, code: int = 0, switches: tuple[str, ...] = ()) -> dict[str, Any]:
    """The report of a dry run of rows of up to 40 tokens, one at a time."""
    from finetune import dryrun

    report = runs.folder / "dry.json"
    given = {
        "--model.model_name_or_path": str(runs.folder / "model"),
        "--model.backend": "transformers",
        "--data.train_file": str(runs.folder / "train.jsonl"),
        "--data.num_proc": "1",
        "--training.output_dir": str(runs.folder / "out"),
        "--training.global_batch_size": "4",
        "--training.per_device_train_batch_size": "1",
        "--json": str(report),
    }
    given |= zip(arguments[::2], arguments[1::2], strict=True)
    assert dryrun.main([*switches, *(word for pair in given.items() for word in pair)]) == code
    return json.loads(report.read_text())


def test_no_longest_row_is_known_of_a_cpu(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    found = dry_run(runs, switches=("--longest",))
    assert found["go"] and found["longest_rows"] is None
    assert "The longest row is not known: a CPU run has no separate memory limit." in capsys.readouterr().out


def test_a_row_that_does_not_fit_is_refused_with_the_settings_that_hold_it(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    """40 tokens need 160 MiB beside the model as `false`, and 20 as `selective`."""
    device = on_a_device(runs, limit=207 * MIB)
    runs.monkeypatch.setattr(longest_row, "SHORT_TOKENS", 8)
    found = dry_run(runs, "--training.gradient_checkpointing", "false", code=1)
    longest = found["longest_rows"]
    assert found["reason"].endswith("It is predicted to fit with training.gradient_checkpointing: selective.")
    assert [one["fits"] for one in longest["modes"]] == [False, True, True, True, True]
    said = " ".join(capsys.readouterr().out.split())
    assert "NO-GO: A micro-batch of 40 tokens does not fit this GPU" in said and "Longest row that fits" in said
    # Four rows need 4 x 40 x 512 KiB as `selective`, of which two fit.
    device.limit_bytes, device.seen = 141 * MIB, []
    four = ("--training.per_device_train_batch_size", "4", "--training.gradient_checkpointing", "selective")
    found = dry_run(runs, *four, code=1)
    assert "The largest that is predicted to fit has 2 rows" in found["reason"]
    assert {tuple(which) for *which, _ in device.seen} == {("selective", False)}  # nothing else is tried


def test_a_dry_run_with_auto_measures_the_job_as_the_run_will_train_it(runs: Runs) -> None:
    device = on_a_device(runs, limit=1000 * MIB)
    runs.monkeypatch.setattr(trial, "TYPICAL_STEPS", 2)
    found = dry_run(runs, "--training.gradient_checkpointing", "auto")
    assert {tuple(which) for *which, _ in device.seen} == set(NEEDS)
    longest = {tuple(one["mode"].values()): one["longest_row_tokens"] for one in found["longest_rows"]["modes"]}
    assert longest == {mode: 900 * MIB // (need * 1024) for mode, need in NEEDS.items()}
    assert found["longest_rows"]["own"]["gradient_checkpointing"] is False
    assert found["longest_rows"]["proof"]["tokens"] == 40
    assert found["config"]["training"]["gradient_checkpointing"] is False
    assert found["measurement"]["facts"]["training.gradient_checkpointing"] is False


def test_a_job_whose_rows_ranks_share_is_measured_as_one_of_them(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its part of the tokens, and of heads in attention: 4 of 4 features, with 2 for keys and for values."""
    runs.monkeypatch.setattr(trial, "TYPICAL_STEPS", 2)
    shared = ("--training.context_parallel", "2", "--data.packing", "true", "--data.max_length", "48")
    found = dry_run(runs, *shared)
    assert found["go"] and found["measurement"]["shared_by"] == 2 and "--nproc_per_node 2" in found["launch"]
    assert found["measurement"]["facts"]["training.context_parallel"] == 2  # the run's, which is scored by it
    assert found["projection"]["step_seconds"] == pytest.approx(sum(found["step"].values()))
    said = " ".join(capsys.readouterr().out.split())
    assert "are without that time" in said and "Measured as one of 2 ranks" in said and "loss, first" not in said


def test_a_sharded_job_whose_rows_ranks_share_is_measured_in_slices_as_one_of_them(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each rank has half of the tokens of a row, so half of the activations that the layers keep."""
    from finetune import train

    model = tiny.make_model(tmp_path / "three-layers", hidden=16, layers=3)

    def run(target: Any, arguments: list[str], *, environment: dict[str, str], **_: Any) -> dict[str, Any]:
        """Of a slice, in this process."""
        report = tmp_path / "slice.json"
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            assert train.main(["--json", str(report), *arguments]) == 0
        return json.loads(report.read_text())

    runs.monkeypatch.setattr(subprocess_dry_run, "run", run)
    runs.monkeypatch.setattr(trial, "TYPICAL_STEPS", 2)
    words = ["--model.model_name_or_path", str(model), "--training.strategy", "shard"]
    words += ["--data.packing", "true", "--data.max_length", "48"]
    words += ["--training.context_parallel", "2"]
    own = ["--model.backend", "transformers", "--data.train_file", str(runs.folder / "train.jsonl")]
    runs.monkeypatch.setattr(sys, "argv", ["finetune", "dryrun", *own, *words])
    shared = dry_run(runs, *words)
    assert shared["go"] and "--nproc_per_node 2" in shared["launch"] and shared["measurement"]["shared_by"] == 2
    kept = shared["sharded"]["activation_gib"]["layers"] * 2**30
    assert kept == pytest.approx(3 * 24 * 16 * 4)  # the layers' inputs
    assert [row["world_size"] for row in shared["sharded"]["rows"]] == [2, 4, 8]  # of four packs in a step
    said = " ".join(capsys.readouterr().out.split())
    assert "Measured as one of 2 ranks that share each row" in said
    assert all(row["exposed_seconds"] is None for row in shared["sharded"]["rows"])


def test_a_slice_that_fills_the_device_says_so_for_advise(runs: Runs, tmp_path: Path) -> None:
    model = tiny.make_model(tmp_path / "three-layers", hidden=16, layers=3)
    words = ["--model.model_name_or_path", str(model), "--training.strategy", "shard"]
    reports = iter([{"go": True}, {"go": False, "reason": "CUDA ran out of memory", "out_of_memory": True}])
    runs.monkeypatch.setattr(subprocess_dry_run, "run", lambda *_, **__: next(reports))
    runs.monkeypatch.setattr(sys, "argv", ["finetune", "dryrun", *words])
    found = dry_run(runs, *words, code=1)
    assert found["reason"] == "2 layers of 3 already fail: CUDA ran out of memory"
    assert found["sharded"] == {"rows": []} and found["config"]["training"]["strategy"] == "shard"


def test_of_too_few_devices_no_shared_rows_are_measured(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    from finetune import dryrun

    words = ["--model.model_name_or_path", str(runs.folder / "model"), "--training.context_parallel", "2"]
    words += ["--data.train_file", str(runs.folder / "train.jsonl"), "--model.backend", "transformers"]
    assert dryrun.main(["--devices", "1", *words]) == 2
    assert "context_parallel 2 does not divide 1 (processes)" in " ".join(capsys.readouterr().err.split())
