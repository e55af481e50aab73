"""The decision, from made-up measurements: every verdict, every reason to refuse, and what is written."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from safetensors.torch import load_file

from finetune import advise, dryrun
from finetune.advise import candidates, command, dense, launch, machine, report, verdict
from finetune.advise.candidates import DryRunner, DryRunResult
from finetune.advise.verdict import Row
from finetune.config import Config, load
from finetune.config.schema import ModelConfig, TrainingConfig
from finetune.errors import RunError, UserError
from finetune.measure import measurements, sharding, strategy
from finetune.measure.measurements import Measurement
from finetune.measure.predict import MIB, Curve, Gradients, Work
from finetune.parity import command as parity
from finetune.runtime.machine.hardware import Gpu, Hardware, Link

FAST = Curve(points=((1024, 1e-5), (1024 * MIB, 0.01)))  # NVLink-like
SLOW = Curve(points=((1024, 1e-3), (1024 * MIB, 1.0)))


def of(world: int, *, step: float = 1.0, steps: float = 1000, memory: float | None = 80e9, peak: float = 20e9, **kw):
    """Work whose compute is shared by `world` ranks."""
    return Work(
        per_device=8 // world,
        compute_seconds=0.9 * step / world,
        accumulation=1,
        backward_share=2 / 3,
        data_seconds=0.0,
        optimizer_seconds=0.1 * step,
        other_seconds=0.0,
        tokens=1000.0,
        steps=steps,
        start_up_seconds=30.0,
        gradients=Gradients(sizes=(kw.get("gradients", 20 * MIB),)),
        peak_memory_bytes=peak,
        memory_bytes=memory,
    )


def table(
    curve: Curve, worlds: tuple[int, ...] = (1, 2, 4), here: int = 8, extra: float = 10.0, price=2.0, **kw
) -> list[Row]:
    return verdict.rows(
        {world: of(world, **kw) for world in worlds},
        {world: (curve, "measured") for world in worlds},
        here=here,
        extra_start_up_seconds=extra,
        price_per_gpu_hour=price,
    )


def test_large_work_and_fast_links_take_all_that_pay() -> None:
    found = table(FAST)
    chosen = verdict.choose(found)
    assert chosen and chosen.world_size == 4 and (chosen.efficiency or 0) >= 0.7
    assert verdict.decision_sentence(chosen, found).startswith("4 devices: 3.0")


def test_below_70_percent_efficiency_is_not_taken_unless_the_fastest_is_asked_for() -> None:
    found = table(SLOW, gradients=400 * MIB)  # 0.39 s of communication
    four = found[-1]
    assert 1 < four.prediction.tokens_per_second / found[0].prediction.tokens_per_second < 2.8
    assert "below 70%" in four.reason and "waiting for communication" in four.reason
    assert verdict.choose(found).world_size == 1
    assert verdict.choose(found, fastest=True).world_size > 1
    assert verdict.decision_sentence(found[0], found).startswith("one device: with 2, ")


def test_a_tiny_step_is_slower_on_several() -> None:
    found = table(SLOW, step=0.002)
    assert verdict.choose(found, fastest=True).world_size == 1
    assert "slower than one" in found[1].reason and found[1].break_even_steps is None


def test_a_short_run_ends_earlier_on_one() -> None:
    found = table(FAST, steps=5)
    assert verdict.choose(found, fastest=True).world_size == 1
    assert "this run ends before" in found[1].reason
    assert found[1].break_even_steps == pytest.approx(10 / 0.45, rel=0.01)  # 10 s more to start, 0.45 s won a step
    assert verdict.choose(table(FAST, steps=200)).world_size == 4


def test_what_does_not_fit_is_never_chosen() -> None:
    found = table(FAST, memory=25e9, peak=20.5e9)  # 0.8 x 25 = 20 GB, without the buckets even
    assert [row.fits for row in found] == [True, False, False]
    assert verdict.choose(found, fastest=True).world_size == 1 and "above the margin" in found[1].reason


def test_devices_that_are_not_here_are_shown_and_not_chosen() -> None:
    found = table(FAST, here=2)
    assert [row.here for row in found] == [True, True, False]
    assert verdict.choose(found).world_size == 2
    assert report.describe(found[2]).startswith("4 devices: not here, predicted from measured: ")


def test_what_was_not_measured_has_a_reason_and_no_figures() -> None:
    found = verdict.rows(
        {1: of(1), 2: of(2), 3: "3 devices do not hold the global batch", 4: of(4)},
        {2: (None, "its all-reduce could not be measured: rank 1 of 2 died (SIGKILL)")},
        here=4,
    )
    assert [row.prediction is None for row in found] == [False, True, True, True]
    assert "died" in found[1].reason and "do not hold" in found[2].reason and "not measured" in found[3].reason
    assert verdict.choose(found, fastest=True).world_size == 1
    assert report.cells(found[1], False) == ["2", "-", "-", "-", "-", "-"]
    json.dumps([row.to_dict() for row in found])


def test_costs_also_at_a_price_of_zero() -> None:
    found = table(FAST, price=0.0)
    assert [row.cost for row in found] == [0.0, 0.0, 0.0]
    assert found[1].price_of_an_hour_saved == 0.0 and "costs 0.00" in report.describe(found[1])
    assert table(FAST)[1].cost == pytest.approx(2 * 2.0 * found[1].prediction.hours)
    assert table(FAST, price=None)[1].cost is None and len(report.cells(table(FAST, price=None)[0], False)) == 6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--price-per-gpu-hour", "-1"], "--price-per-gpu-hour: expected a price of at least 0, got '-1'"),
        (["--price-per-gpu-hour", "nan"], "expected a price of at least 0"),
        (["--world-sizes", "1,two"], "expected integers of at least 1, such as 1,2,4"),
        (["--world-sizes", "0"], "expected integers of at least 1, such as 1,2,4"),
        (["--batch", "8"], "--batch is for --model"),
        (["--rules", "--price-per-gpu-hour", "0"], "--rules measures nothing"),
        (["--comm", "missing.json"], "Not a valid result of `finetune bench comm --json`"),
        (["--model", "dense-1b"], "dense-258k, dense-6.9m"),
        (["--model", "dense-258k", "--rules"], "--model excludes"),
        (["--model", "dense-258k", "--training.max_steps", "3"], "--model replaces the configuration"),
        (["--training.learing_rate", "1"], "learning_rate"),
    ],
)
def test_bad_options(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = arguments if "--model" in arguments or "--batch" in arguments else [*arguments, *configuration(tmp_path)]
    assert advise.main(given) == 2
    assert said in capsys.readouterr().err


def configuration(folder: Path, *extra: str) -> list[str]:
    return ["--model.model_name_or_path", "m", "--data.train_file", str(folder / "t.jsonl"), *extra]


@pytest.mark.process
def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from finetune import advise\n"
        "assert advise.main(['--help']) == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    from tests.helpers import launch as runs

    done = subprocess.run([*runs.command("python"), "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--price-per-gpu-hour" in done.stdout


# --- machines -------------------------------------------------------------------------------------------------------


def host(*gpus: Gpu, **kw: Any) -> Hardware:
    links = tuple(
        Link(gpus=(a.index, b.index), kind="PHB", nvlinks=0, gb_per_s=None, peer_access=False)
        for a in gpus
        for b in gpus
        if a.index < b.index
    )
    return Hardware(
        device="cuda" if gpus else "cpu",
        name=gpus[0].name if gpus else "x86_64",
        count=len(gpus),
        memory_gib=gpus[0].memory_gib if gpus else None,
        peak_bf16_tflops=None,
        peak_reason="",
        cpu_cores=kw.pop("cpu_cores", 2),
        ram_gib=8.0,
        gpus=gpus,
        links=links,
        **kw,
    )


def card(index: int, name: str = "NVIDIA L4", **kw: Any) -> Gpu:
    return Gpu(index=index, name=name, compute_capability="8.9", multiprocessors=58, memory_gib=22.0, **kw)


def test_unlike_gpus_are_not_scaled_over() -> None:
    mixed = host(card(0), card(1, "NVIDIA L40S"))
    assert machine.devices_here(mixed) == 1
    assert any("the slowest would set the pace" in text and "L40S" in text for text in machine.warnings(mixed))
    assert machine.devices_here(host(card(0), card(1))) == 2 and machine.warnings(host(card(0), card(1))) == []


def test_machines_to_be_warned_of() -> None:
    assert "in use by another process (4711)" in machine.warnings(host(card(0, other_processes=(4711,))))[0]
    assert "NVML is unavailable (no driver)" in machine.warnings(host(card(0), unknown={"NVML": "no driver"}))[0]
    throttled = host(card(0, power_limit_w=72.0), card(1, power_limit_w=60.0))
    assert machine.devices_here(throttled) == 2 and "may wait for the slower" in machine.warnings(throttled)[0]
    assert "there is no GPU" in machine.warnings(host())[0]
    assert machine.devices_here(host()) == 2 and machine.devices_here(host(cpu_cores=1)) == 1


# --- candidates -----------------------------------------------------------------------------------------------------


def measurement(*, step: float = 1.0, per_device: int = 8, full: bool = False, packed: bool = False) -> Measurement:
    return Measurement(
        facts={"tokens per pack": 64 if packed else None},
        when="2026-01-01T00:00:00+00:00",
        per_device=per_device,
        global_batch_size=16,
        seconds_per_micro_batch=step / (16 / per_device),
        seconds_per_token=0.0,
        residual_seconds=[],
        backward_share=0.6,
        data_seconds=0.0,
        optimizer_seconds=0.0,
        other_seconds=0.0,
        start_up_seconds=10.0,
        compute_seconds={str(world): step / world for world in (1, 2, 4, 8) if 16 % (world * per_device) == 0},
        tokens_per_step=1000.0,
        steps=100.0,
        peak_memory_bytes=1e9,
        memory_bytes=80e9,
        parameters=1_000_000_000,
        trainable_parameters=10_000_000,
        gradient_bytes=[40_000_000],
        gradient_dtype="float32",
        as_bucket_view=full,
        gradients_in_peak=True,
        bucket_cap_bytes=25 * MIB,
        first_bucket_bytes=MIB,
    )


def test_a_measurement_of_an_earlier_version_is_read() -> None:
    content = measurement().to_dict()
    assert Measurement.from_dict(content) == measurement()
    content["global_size"] = content.pop("global_batch_size")
    assert Measurement.from_dict(content) == measurement()


FULL = DryRunResult(measured=None, reason="CUDA ran out of memory", full=True)


class FakeBench(DryRunner):
    """Dry runs by their extra arguments; what is not listed does not fit."""

    def __init__(self, results: dict[str, DryRunResult]) -> None:
        super().__init__(arguments=[])
        self.results, self.asked, self.otherwise = results, [], FULL

    def try_out(self, extra: Any, ranks: int = 1) -> DryRunResult:
        key = " ".join(extra)
        self.asked.append(key)
        return self.results.get(key, self.otherwise)


def config(folder: Path, *extra: str):
    return load(configuration(folder, *extra), command="advise")


OFF, SIZE = "--training.gradient_checkpointing false", "--training.per_device_train_batch_size"


def test_better_settings_of_one_device_come_first(tmp_path: Path) -> None:
    base = DryRunResult(measured=measurement(), recommended=16)
    bench = FakeBench(
        {
            "--data.packing true": DryRunResult(measured=measurement(step=0.4, packed=True)),
            OFF: DryRunResult(measured=measurement(step=0.8)),
            f"{SIZE} 16": DryRunResult(measured=measurement(step=0.99, per_device=16)),  # 1 %: noise
        }
    )
    found = candidates.improvements(config(tmp_path), bench, base)
    assert [one.change.name for one in found] == ["packing", "no checkpointing"]
    assert found[0].factor == pytest.approx(2.5) and not found[0].change.same_result
    # Packing changes what a step is: it is told, and not put into the launch line.
    assert candidates.choose_changes(bench, found) == tuple(OFF.split())


def test_fewer_rows_at_a_time_may_be_faster(tmp_path: Path) -> None:
    """Else one device would be compared with two that have smaller micro-batches, and these would get the credit."""
    sizes = {4: 0.5, 16: 0.9}
    bench = FakeBench(
        {f"{SIZE} {n}": DryRunResult(measured=measurement(step=t, per_device=n)) for n, t in sizes.items()}
    )
    found = candidates.improvements(config(tmp_path), bench, DryRunResult(measured=measurement()))
    assert [one.change.name for one in found] == ["4 rows at a time"]  # of two sizes the better
    assert candidates.choose_changes(bench, found) == (SIZE, "4")
    fixed = config(tmp_path, "--training.gradient_accumulation_steps", "2")
    assert candidates.other_micro_batches(fixed, DryRunResult(measured=measurement())) == []


def test_faster_settings_are_taken_together_only_where_that_is_faster(tmp_path: Path) -> None:
    base = DryRunResult(measured=measurement(), recommended=16)
    singles = {
        OFF: DryRunResult(measured=measurement(step=0.8)),
        f"{SIZE} 16": DryRunResult(measured=measurement(step=0.9, per_device=16)),
    }
    for together, expected in ((0.7, f"{OFF} {SIZE} 16"), (0.85, OFF)):
        both = {f"{OFF} {SIZE} 16": DryRunResult(measured=measurement(step=together, per_device=16))}
        bench = FakeBench(singles | both)
        found = candidates.improvements(config(tmp_path), bench, base)
        assert " ".join(candidates.choose_changes(bench, found)) == expected
    full = FakeBench(singles)  # both together do not fit
    assert " ".join(candidates.choose_changes(full, candidates.improvements(config(tmp_path), full, base))) == OFF


def test_each_world_size_is_measured_with_its_own_micro_batch(tmp_path: Path) -> None:
    bench = FakeBench({f"{SIZE} {n}": DryRunResult(measured=measurement(per_device=n)) for n in (1, 2, 4, 8)})
    found = candidates.measure_at_world_sizes(config(tmp_path), bench, measurement(), (), [1, 2, 3, 4, 16])
    assert [one if isinstance(one, str) else one.per_device for one in found.values()][:2] == [8, 8]
    assert f"{SIZE} 8" not in bench.asked  # what was measured already; ranks on a CPU share it, and are measured anew
    bench.cpu_cores = 2
    assert (
        candidates.measure_at_world_sizes(config(tmp_path), bench, measurement(), (), [2])[2]
        and bench.asked[-1] == f"{SIZE} 8"
    )
    assert "the global batch does not fit 3 devices" in str(found[3])
    assert isinstance(found[4], Measurement) and found[4].per_device == 4
    assert isinstance(found[16], Measurement) and found[16].per_device == 1


def test_settings_that_cannot_be_tried_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes is missing, say: no reason to give no advice. The configuration as given has to be sound."""

    def refused(*args: Any, **kw: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(args, 2, stdout="", stderr="error: model.load_in_4bit needs bitsandbytes\n")

    monkeypatch.setattr(candidates.subprocess_dry_run.subprocesses, "run", refused)
    bench = DryRunner(arguments=[])
    assert bench.try_out(["--model.load_in_4bit", "true"]) == DryRunResult(
        measured=None, reason="A dry run failed: model.load_in_4bit needs bitsandbytes"
    )
    with pytest.raises(UserError, match="needs bitsandbytes"):
        bench.try_out([])


def test_what_would_make_a_model_fit(tmp_path: Path) -> None:
    full = config(tmp_path, "--model.full_finetuning", "--training.gradient_checkpointing", "false")
    assert [one.name for one in candidates.remedies(full, on_cpu=False)] == [
        "one row at a time",
        "checkpointing",
        "8-bit Adam",
        "LoRA instead of full fine-tuning",
        "4 bits (QLoRA)",
        "rows of at most 1024 tokens",
    ]
    less = f"{SIZE} 1 --training.gradient_checkpointing unsloth"
    for last in ("--training.optim adamw_8bit", "--model.full_finetuning false"):  # LoRA's few states stay as they were
        fits = {f"{less} {last}": DryRunResult(measured=measurement())}
        taken, result = candidates.make_fit(full, FakeBench(fits), False, FULL)
        assert len(taken) == 3 and result and result.measured
    taken, result = candidates.make_fit(full, FakeBench({}), False, FULL)
    assert len(taken) == 5 and result is None
    for given, on_cpu in ((["--training.optim", "adamw_torch_8bit"], False), ([], True)):
        other = candidates.remedies(config(tmp_path, "--model.full_finetuning", *given), on_cpu=on_cpu)
        assert candidates.OPTIMIZER not in [one.arguments[0] for one in other]


def test_rows_are_left_alone_while_the_device_is_full_without_them(tmp_path: Path) -> None:
    """Fewer rows at a time would be slower for nothing; they matter once the rest fits."""
    full = config(tmp_path, "--model.full_finetuning", "--training.gradient_checkpointing", "false")
    no_row = replace(FULL, state_fits=False)
    eight = "--training.optim adamw_8bit"
    bench = FakeBench({f"{eight} {SIZE} 1": DryRunResult(measured=measurement())})
    taken, _ = candidates.make_fit(full, bench, False, no_row)
    assert [one.name for one in taken] == ["8-bit Adam", "one row at a time"]
    assert bench.asked == [eight, f"{eight} {SIZE} 1"]
    bench = FakeBench({})
    bench.otherwise = no_row
    assert candidates.make_fit(full, bench, False, no_row)[1] is None
    lora = "--model.full_finetuning false"
    assert bench.asked == [eight, lora, f"{lora} --model.load_in_4bit true"]
    report = {"go": False, "reason": "full", "out_of_memory": True, "state_fits": False}
    assert candidates.parse_report(report) == DryRunResult(measured=None, reason="full", full=True, state_fits=False)


def test_a_remedy_that_is_refused_for_another_reason_is_left_out(tmp_path: Path) -> None:
    full = config(tmp_path, "--model.full_finetuning", SIZE, "1")
    refused = DryRunResult(measured=None, reason="8 bits need bitsandbytes")
    fits = DryRunResult(measured=measurement())
    # In 4 bits, which need it too, and so with fewer tokens alone.
    lora = "--model.full_finetuning false"
    bench = FakeBench(
        {
            "--training.optim adamw_8bit": refused,
            f"{lora} --model.load_in_4bit true": refused,
            f"{lora} --data.max_length 1024": fits,
        }
    )
    taken, result = candidates.make_fit(full, bench, False, FULL)
    assert [one.name for one in taken] == ["LoRA instead of full fine-tuning", "rows of at most 1024 tokens"]
    assert result is fits


def test_a_model_that_fits_no_gpu_gets_no_launch_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = FakeBench({f"{SIZE} 1": DryRunResult(measured=measurement(per_device=1))})
    monkeypatch.setattr(candidates, "Bench", lambda **kw: bench)
    monkeypatch.setattr("finetune.runtime.machine.hardware.survey", lambda: host(card(0), card(1)))
    report = tmp_path / "advice.json"
    assert advise.main(configuration(tmp_path, "--json", str(report))) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "NO: CUDA ran out of memory" in said
        and f"It fits with one row at a time (measured: 0.9 of 74.5 GiB): {SIZE} 1" in said
    )
    assert "accelerate-launch" not in said
    content = json.loads(report.read_text())
    assert content["launch"] is None and content["fits_with"] == [SIZE, "1"]
    assert "above 0.8" not in said
    bench.results[f"{SIZE} 1"] = DryRunResult(measured=replace(measurement(per_device=1), peak_memory_bytes=70e9))
    assert advise.main(configuration(tmp_path)) == 1
    assert "(measured: 65.2 of 74.5 GiB)" in (said := " ".join(capsys.readouterr().out.split())) and "above 0.8" in said
    bench.results.clear()
    assert advise.main(configuration(tmp_path)) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "With DDP more GPUs do not help" in said and "training.strategy: shard helps is not known" in said


def test_a_model_that_fits_no_gpu_may_fit_sharded(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "Bench", lambda **kw: FakeBench({}))
    small = {"memory_gib": 0.00095}
    monkeypatch.setattr("finetune.runtime.machine.hardware.survey", lambda: replace(host(card(0), card(1)), **small))
    words = ["--model.model_name_or_path", str(tiny_model), "--data.train_file", str(tmp_path / "t.jsonl")]
    (tmp_path / "t.jsonl").write_text("{}\n")
    found = sharding.read_sizes(tiny_model)
    assert found is not None
    whole = sum(one.numel() for one in load_file(tiny_model / "model.safetensors").values())
    assert found.total == whole and 2 * found.layer + found.outside == whole  # of two equal layers
    report = tmp_path / "advice.json"
    assert advise.main([*words, "--model.full_finetuning", "--json", str(report)]) == 1
    said, shard = " ".join(capsys.readouterr().out.split()), json.loads(report.read_text())["shard"]
    stored = sharding.Storage(layer=2, outside=2, full=True, state=8)  # stochastic rounding: states in float32
    needed = sharding.bytes_per_gpu(found, shard["world_size"], stored)
    assert shard["gib_per_gpu"] == pytest.approx(needed / 2**30, rel=1e-4)
    assert shard["gib_per_gpu"] <= 0.8 * 0.00095 and shard["world_size"] > 2
    embedding = found.outside - found.root
    assert 2 * embedding < found.outside < 2.01 * embedding  # and a head of the same shape, and a norm
    by_size = [  # parts; two layers and the rest gathered; gradients of a layer and of the root; the layer's in float32
        12 * whole / ranks + 2 * whole + 2 * found.layer + 2 * found.root + found.layer * (4 + (4 + 2) / ranks)
        for ranks in (2, 4, 8)
    ]
    assert list(shard["gib_by_world_size"].values()) == pytest.approx([one / 2**30 for one in by_size], rel=1e-4)
    assert list(shard["gib_by_world_size"]) == ["2", "4", "8"] and "On 2, 4, 8 GPUs each needs 0.0, 0.0, 0.0" in said
    assert f"it fits on {shard['world_size']} GPUs, of which 2 are here" in said
    assert advise.main([*words, "--model.load_in_8bit"]) == 1
    assert "It cannot be sharded (training.strategy: shard): sharding load_in_8bit" in " ".join(
        capsys.readouterr().out.split()
    )


def test_auto_is_advised_to_shard_only_if_nothing_else_fits(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs whose memory is full with every change of settings, 8-bit Adam and LoRA among them."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    bench = FakeBench({})
    monkeypatch.setattr(candidates, "Bench", lambda **kw: bench)
    found = sharding.read_sizes(tiny_model)
    assert found is not None
    needed = sharding.bytes_per_gpu(found, 2, sharding.Storage(layer=2, outside=2, full=True, state=8))
    machine = replace(host(card(0), card(1)), memory_gib=1.01 * needed / 0.8 / 2**30)
    monkeypatch.setattr("finetune.runtime.machine.hardware.survey", lambda: machine)
    (tmp_path / "t.jsonl").write_text("{}\n")
    words = ["--model.model_name_or_path", str(tiny_model), "--data.train_file", str(tmp_path / "t.jsonl")]
    words.append("--model.full_finetuning")
    seven = [*words, "--training.global_batch_size", "7"]  # which two GPUs cannot share
    assert advise.main(seven) == 1 and "auto will shard" not in capsys.readouterr().out
    assert advise.main(words) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "training.strategy: auto will shard it on this machine, because one GPU is full, also with" in said
    advice = strategy.find_advice(load(words, command="advise"), machine.count)
    assert advice is not None and (advice["strategy"], advice["world_size"]) == ("shard", 2)
    assert any("adamw_8bit" in asked for asked in bench.asked)
    assert "LoRA instead of full fine-tuning" in advice["reason"]
    decision = strategy.decide(load(words, command="advise"), machine.count)
    assert decision.shards and decision.world_size == 2
    strategy.advice_file(load(words, command="advise"), machine.count).unlink()
    bench.results[""], bench.otherwise = (
        FULL,
        DryRunResult(measured=measurement()),
    )  # any change helps: it is the user's
    assert advise.main(words) == 1
    assert "It fits with" in capsys.readouterr().out
    assert strategy.find_advice(load(words, command="advise"), machine.count) is None


def test_the_whole_story_on_two_like_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the options to the files, with dry runs and the all-reduce made up."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    bench = FakeBench({"": DryRunResult(measured=measurement()), f"{SIZE} 8": DryRunResult(measured=measurement())})
    monkeypatch.setattr(candidates, "Bench", lambda **kw: bench)
    monkeypatch.setattr("finetune.runtime.machine.hardware.survey", lambda: host(card(0), card(1)))
    monkeypatch.setattr(candidates.comm, "measure", all_reduce)
    report, out = tmp_path / "advice.json", tmp_path / "advised"
    arguments = configuration(tmp_path, "--json", str(report), "--out", str(out), "--as-given")
    assert advise.main([*arguments, "--price-per-gpu-hour", "0"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "ADVICE: 2 devices" in said and "only those of the adapter," in said
    assert "Rule set study2025: measure (1e+03 M parameters with a batch of 16" in said
    advice = json.loads(report.read_text())
    assert advice["world_size"] == 2 and [row["cost"] for row in advice["rows"]] == [0.0, 0.0]
    assert advice["environment"] == {"NCCL_P2P_DISABLE": "1"} and "NCCL_P2P_DISABLE=1 accelerate" in advice["launch"]
    assert "# no pair of GPUs has peer access" in (out / "environment.sh").read_text()
    assert load_config_from_file(str(out / "profile.yaml")).num_processes == 2
    # For the score of the real run, which has the environment that was measured, and of no other.
    same = {"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "INFO"}
    assert measurements.find_comm(2, "nccl", "NVIDIA L4", same)[0] is not None
    assert measurements.find_comm(2, "nccl", "NVIDIA L4", {})[0] is None
    # `training.strategy: auto` finds it.
    from finetune.measure import strategy

    found = strategy.find_advice(load(configuration(tmp_path)), 2)
    assert found and found["world_size"] == 2 and found["environment"] == {"NCCL_P2P_DISABLE": "1"}
    assert strategy.find_advice(load(configuration(tmp_path, "--lora.r", "8")), 2) is None
    # A rank that dies while the all-reduce is measured leaves one device, and says so.
    monkeypatch.setattr(candidates.comm, "measure", dies)
    assert advise.main(arguments) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "could not be measured: rank 1 of 2 died (SIGKILL)" in said and "ADVICE: one device" in said


def all_reduce(world: int, sizes: Any = None, *args: Any, **kw: Any) -> dict[str, Any]:
    rows = [{"bytes": size, "seconds": {"median": 1e-5 + size / 2e10}} for size in sizes]
    about = {"kind": "comm", "world_size": world, "backend": "nccl", "environment": kw.get("environment") or {}}
    return about | {"collectives": {"all_reduce": rows}}


def dies(*args: Any, **kw: Any) -> dict[str, Any]:
    raise RunError("rank 1 of 2 died (SIGKILL); the others were stopped")


def test_a_file_of_bench_comm_also_speaks_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    runs = [all_reduce(2, [1024]), all_reduce(8, [1024, 4096]), all_reduce(2, [9]) | {"variant": "Tree"}]
    path = tmp_path / "comm.json"
    path.write_text(json.dumps({"kind": "comm", "runs": runs}))
    found = measurements.read_comm(path)
    assert set(found) == {2, 8} and found[2].points[0][0] == 1024  # of two settings the first: the advised ones
    assert command.world_sizes(command.parse([])[0], 1, found) == [1, 2, 8]
    path.write_text(json.dumps(all_reduce(4, [1024])))
    assert set(measurements.read_comm(path)) == {4}
    path.write_text("[1]")
    with pytest.raises(UserError, match="Measure again"):
        measurements.read_comm(path)


# --- what is written ------------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize(("world", "on_cpu"), [(1, True), (2, True), (1, False), (4, False)])
def test_profiles_are_what_accelerate_reads_them_as(tmp_path: Path, world: int, on_cpu: bool) -> None:
    here = host() if on_cpu else host(*map(card, range(4)))
    plan = launch.plan(world, here, ["--config", "my file.yaml"], tmp_path / "advised")
    (tmp_path / "advised").mkdir()
    (tmp_path / "advised" / "launch.sh").symlink_to(tmp_path / "elsewhere")
    launch.write(tmp_path / "advised", plan, "because")
    assert not (tmp_path / "elsewhere").exists()  # a link is replaced, not followed
    read = load_config_from_file(str(tmp_path / "advised" / "profile.yaml"))
    assert read.num_processes == world and read.use_cpu is on_cpu
    shipped = "single.yaml" if world == 1 else "cpu_2.yaml" if on_cpu else "ddp_4.yaml"
    ours, theirs = (
        yaml.safe_load(path.read_text())
        for path in (tmp_path / "advised" / "profile.yaml", Path("accelerate_configs") / shipped)
    )
    assert ours == theirs | {"use_cpu": on_cpu}
    script = tmp_path / "advised" / "launch.sh"
    assert subprocess.run(["sh", "-n", script], check=False).returncode == 0
    assert "--config 'my file.yaml'" in script.read_text() and script.stat().st_mode & 0o111


def test_launch_lines_without_a_folder() -> None:
    assert launch.plan(2, host(), ["--x", "1"], None).line.startswith("torchrun --standalone --nproc_per_node 2 -m ")
    assert "--multi_gpu --num_processes 2" in launch.plan(2, host(card(0), card(1)), [], None).line
    assert launch.plan(1, host(), [], None).line.startswith("python -m finetune.train")


def test_secrets_of_the_command_line_stay_out_of_the_launch_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, word = "hf" + "_" + "aB3xK9qZ7mW2" * 3, "correct horse"
    arguments = ["--training.hub_token", word, f"--x.api_key={word}", "--model.loader_kwargs", f"{{name: {token}}}"]
    arguments += ["--training.seed", "7"]
    plan = launch.plan(1, host(), arguments, tmp_path)
    launch.write(tmp_path, plan, "because")
    monkeypatch.setattr("sys.argv", ["finetune", "train", "--dry-run", *arguments])
    for shown in (plan.line, (tmp_path / "launch.sh").read_text(), dryrun.launch_line(2)):
        assert token not in shown and word not in shown and "--training.seed 7" in shown

    failed = subprocess.CompletedProcess([], 2, stdout="", stderr=f"error: no {token}\n")
    monkeypatch.setattr(parity.subprocesses, "run", lambda *_, **__: failed)
    with pytest.raises(UserError) as said:
        parity.run_case(parity.Case(1, "ddp", "auto"), tmp_path / "run", 1, "", arguments)
    assert token not in str(said.value) and "***" in str(said.value)


# --- a script ---------------------------------------------------------------------------------------------------------


class DryRuns:
    """Dry runs of a script on two GPUs, made up; `asked` has their command lines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str, memory: int = 64) -> None:
        self.asked: list[str] = []
        self.kind, self.memory = kind, memory  # rows at a time that fit
        self.rows = "--training.per_device_train_batch_size " if kind == "script.run" else f"{SIZE[2:]}="
        monkeypatch.setattr(candidates.subprocess_dry_run, "run", self.report)
        monkeypatch.setattr("finetune.runtime.machine.hardware.survey", lambda: host(card(0), card(1)))
        monkeypatch.setattr(candidates.comm, "measure", all_reduce)
        monkeypatch.setenv("FINETUNE_CACHE", str(folder / "cache"))
        monkeypatch.chdir(folder)
        Path("mine.py").write_text("from finetune import SFTTrainer\n")

    def report(self, target: list[str], arguments: list[str], **_: Any) -> dict[str, Any]:
        said = " ".join([*target, *arguments])
        self.asked.append(said)
        given = re.search(rf"{self.rows}(\d+)", said)
        rows = int(given[1]) if given else 4
        batch: dict[str, Any] = {
            "global_batch_size": 16,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
        }
        if self.kind == "script.run":
            batch = {"global_batch_size": 16}
        settings = Config(model=ModelConfig(model_name_or_path="m"), training=TrainingConfig(**batch)).to_dict()
        about = {"config": settings, "script": self.kind}
        if rows > self.memory:
            return {"go": False, "reason": "CUDA ran out of memory", "out_of_memory": True, "state_fits": True, **about}
        sizes = {"recommended": 8}
        found = measurement(step=4 / rows, per_device=rows).to_dict()
        return {"go": True, "measurement": found, "micro_batch_search": sizes, **about}


def test_a_script_is_advised_by_dry_runs_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dry = DryRuns(monkeypatch, tmp_path, "SFTTrainer")
    words = ["mine.py", "--model", "x", "--world-sizes", "1,2", "--batch", "7", "--json", "advice.json", "--out", "out"]
    assert advise.main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    first, *others = dry.asked
    assert first == "-m finetune.dryrun --devices 2 mine.py -- --model x --batch 7"
    fixed = "-m finetune.dryrun --devices 1 mine.py -- --model x --batch 7 --finetune training.global_batch_size=16"
    assert others and all(one.startswith(fixed) for one in others)
    assert not any("model.load" in one for one in others)  # which the script decides
    assert f"{fixed} --finetune data.packing=true" in others
    assert "8 rows at a time is 2.00 times as fast (--finetune training.per_device_train_batch_size=8)" in said
    advice = json.loads(Path("advice.json").read_text())
    given = "--model x --batch 7 --finetune training.global_batch_size=16"
    command_line = f"mine.py {given} --finetune training.per_device_train_batch_size=8"
    assert advice["world_size"] == 2 and advice["launch"].endswith(command_line)
    assert (
        command_line in Path("out/launch.sh").read_text() and "finetune.train" not in Path("out/launch.sh").read_text()
    )
    assert not list(Path("cache").rglob("advice-*"))  # of `training.strategy: auto`, which a script does not have


def test_a_script_whose_settings_are_in_a_file_is_advised_by_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dry = DryRuns(monkeypatch, tmp_path, "script.run")
    assert advise.main(["mine.py", "--training.max_steps", "9", "--json", "advice.json"]) == 0
    assert "-m finetune.dryrun --devices 1 mine.py -- --training.max_steps 9 --data.packing true" in dry.asked
    launched = json.loads(Path("advice.json").read_text())["launch"]
    assert launched.endswith("mine.py --training.max_steps 9 --training.per_device_train_batch_size 8")
    assert list(Path("cache").rglob("advice-*"))


def test_what_would_make_a_script_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    DryRuns(monkeypatch, tmp_path, "SFTTrainer", memory=1)
    assert advise.main(["mine.py"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "It fits with one row at a time (measured: " in said
    assert (
        "--finetune training.per_device_train_batch_size=1. " in said and "a run from a configuration can shard" in said
    )
    DryRuns(monkeypatch, tmp_path, "SFTTrainer", memory=0)
    assert advise.main(["mine.py"]) == 1
    assert "Tried, but not enough: one row at a time, " in " ".join(capsys.readouterr().out.split())


def test_a_script_and_a_model_of_the_study_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert advise.main(["--model", "dense-258k", "--batch", "8", "mine.py"]) == 2
    assert "--model replaces the configuration, but one was given: mine.py" in capsys.readouterr().err


# --- the study's dense models ---------------------------------------------------------------------------------------


def test_dense_models_are_reckoned_from_their_own_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    job = dense.choose_model("dense-258k", 64)
    assert sum(job.gradients.sizes) == 4 * job.model.parameters

    def measure(models: Any, world: int, environment: Any, options: Any, machine: Any, *, ddp: bool) -> dict:
        assert world == 1 and models[0].batches == ((32,) if ddp else (64,))
        seconds = {"forward": 1.0, "backward": 2.0, "optimizer": 0.5, "other": 0.5}
        parts = {name: {"median": value} for name, value in seconds.items()}
        ranks = [{"seconds": parts, "memory_gib": 0.5}]  # with buckets in DDP
        return {("258K", batch): {"step_seconds": {"median": batch / 32}, "ranks": ranks} for batch in (64, 32)}

    monkeypatch.setattr(dense.study, "measure", measure)
    found = dense.candidates(job, [1, 2, 3], host(card(0), card(1)))
    assert isinstance(found[3], str) and "does not divide exactly over 3 devices" in found[3]
    one, two = found[1], found[2]
    assert isinstance(one, Work) and isinstance(two, Work)
    # The step as a whole counts; the parts, which were measured in another run, share it out.
    assert one.compute_seconds == pytest.approx(2 * 3 / 4) and two.compute_seconds == pytest.approx(3 / 4)
    assert one.backward_share == pytest.approx(2 / 3)
    assert replace(one, compute_seconds=0).optimizer_seconds == pytest.approx(0.25)
    rows = verdict.rows(found, {2: (SLOW, "slow")}, here=2)
    assert rows[0].prediction and rows[0].prediction.step_seconds == pytest.approx(2.0)
    assert [row.prediction.peak_memory_bytes for row in rows[:2] if row.prediction] == [2**29, 2**29]
    short = [replace(rows[0], prediction=replace(rows[0].prediction, step_seconds=0.002)), *rows[1:]]
    assert report.short_step(rows, host(card(0))) == [] and report.short_step(short, host()) == []
    (note,) = report.short_step(short, host(card(0)))
    assert note.startswith("A step of 2.0 ms is the host launching kernels")
