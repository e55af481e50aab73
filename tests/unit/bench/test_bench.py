"""What `finetune bench` computes from its measurements, and what it refuses, without starting a rank."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import types
from importlib import util as importlib_util
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.bench import comm, comm_report, command, conditions, launch, timeline, windows
from finetune.bench.command import main, parse
from finetune.bench.launch import choose_world_sizes
from finetune.bench.study import command as study
from finetune.bench.study import lora as study_lora
from finetune.bench.study import published
from finetune.bench.study import report as study_report
from finetune.bench.study.rank import dense
from finetune.config import load
from finetune.errors import RunError, UserError
from finetune.measure import measurements
from finetune.runtime import clock, communication
from finetune.runtime.machine import hardware
from finetune.runtime.ranks import distributed
from tests.helpers.nvml import Card, install


def machine(monkeypatch: pytest.MonkeyPatch, count: int, link: int | str, **how: Any) -> hardware.Hardware:
    pairs = dict.fromkeys(itertools.combinations(range(count), 2), link)
    install(monkeypatch, how.pop("cards", [Card(hides_switch=True)] * count), pairs, **how)
    return hardware.survey()


# --- communication --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("collective", "ranks", "bus"),  # GB/s of 1 GB in 1 s, by the text of nccl-tests' PERFORMANCE.md
    [("all_reduce", 2, 1.0), ("all_reduce", 8, 1.75), ("reduce_scatter", 8, 0.875), ("all_gather", 4, 0.75)]
    + [("broadcast", 2, 1.0), ("broadcast", 8, 1.0)],
)
def test_bandwidths_are_those_of_nccl_tests(collective: str, ranks: int, bus: float) -> None:
    assert comm.bandwidths(collective, 10**9, 1.0, ranks) == pytest.approx({"algbw_gb_s": 1.0, "busbw_gb_s": bus})


def test_settings_worth_trying_by_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = {one.name: one for one in comm.variants(machine(monkeypatch, 4, 18))}
    assert {"peer access off", "Ring", "Tree", "Simple", "LL", "LL128", "buffer 32 MiB"} < set(tried)
    assert all(one.environment["NCCL_NVLS_ENABLE"] == "0" for one in tried.values())  # it stays off
    assert tried["peer access off"].environment["NCCL_P2P_DISABLE"] == "1"
    assert tried["Tree"].collectives == ("all_reduce",)  # no other has that algorithm

    bridge = {one.name: one for one in comm.variants(machine(monkeypatch, 2, "PHB", peers=False))}
    assert bridge["as advised"].environment == {"NCCL_P2P_DISABLE": "1"}
    assert bridge["peer access left to NCCL"].environment == {"NCCL_P2P_DISABLE": "0"}
    assert "LL128" not in bridge and "peer access off" not in bridge  # LL128 may corrupt data there

    for count, here in ((1, "one GPU"), (0, "no GPU")):
        found = machine(monkeypatch, 1, 18) if count else hardware.Hardware(**_cpu())
        with pytest.raises(UserError, match=here):
            comm.variants(found)


def _cpu() -> dict[str, Any]:
    bare = {"device": "cpu", "name": "x", "count": 0, "memory_gib": None, "peak_bf16_tflops": None, "peak_reason": ""}
    return {**bare, "cpu_cores": 2, "ram_gib": 8.0, "gpus": (), "links": ()}


def test_world_sizes_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    two = machine(monkeypatch, 2, 18)
    comm.check_world(2, two)
    with pytest.raises(UserError, match="the number of visible GPUs is 2"):
        comm.check_world(4, two)
    with pytest.raises(UserError, match="two ranks or more"):
        comm.check_world(1, two, least=2)
    assert choose_world_sizes(None, 8) == [1, 2, 4, 8] and choose_world_sizes(None, 8, least=2) == [2, 4, 8]
    assert choose_world_sizes(None, 1) == [1] and choose_world_sizes(None, 1, least=2) == [
        2
    ]  # which one GPU then refuses
    assert choose_world_sizes(None, 0) == [1, 2] and choose_world_sizes([3], 0) == [3]


def test_buckets_of_a_job_are_those_of_ddp(tiny_model: Path) -> None:
    """The adapter as PEFT makes it on the loaded model, cut by torch's own function."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    extra = ["--lora.r", "64", "--lora.modules_to_save", "[lm_head]"]
    arguments = ["--model.model_name_or_path", str(tiny_model), "--data.train_file", "x.jsonl", *extra]
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model),
        LoraConfig(r=64, target_modules=targets, modules_to_save=["lm_head"], task_type="CAUSAL_LM"),
    )
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    torch_says, _ = torch.distributed._compute_bucket_assignment_by_size(trained[::-1], [2**20, 25 * 2**20])
    sizes = [4 * parameter.numel() for parameter in trained[::-1]]
    assert comm_report.job_buckets(arguments) == [sum(sizes[place] for place in bucket) for bucket in torch_says]
    with pytest.raises(UserError, match="model_name_or_path"):
        comm_report.job_buckets(["--training.max_steps", "3"])


def test_a_setting_that_fails_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NCCL refuses a protocol: the table has the rest, and the JSON says which failed and why."""

    def measure(world: int, sizes: list[int], *arguments: Any, **named: Any) -> dict[str, Any]:
        if arguments[2].get("NCCL_PROTO") == "LL128":
            raise RunError("no algorithm/protocol available")
        median = {"LL": 4e-4, "Simple": 1.1e-4}.get(arguments[2].get("NCCL_PROTO"), 1e-4)
        seconds = {"median": median, "ci95": [median - 1e-5, median + 1e-5]}
        rows = [{"bytes": size, "seconds": seconds, "algbw_gb_s": 1.0, "busbw_gb_s": 1.0} for size in sizes]
        collectives = dict.fromkeys(named["collectives"], rows)
        kept = {"kind": "comm", "world_size": world, "backend": "nccl", "conditions": {"warnings": []}}
        return kept | {"collectives": collectives, "environment": arguments[2]}

    found = machine(monkeypatch, 2, 18)
    monkeypatch.setattr(comm_report, "survey", lambda: found)
    monkeypatch.setattr(comm, "measure", measure)
    words = ["comm", "--settings", "--sizes", "4096,65536,26214400,67108864", "--json", str(tmp_path / "x.json")]
    assert main(words) == 0
    result = json.loads((tmp_path / "x.json").read_text())
    names = [run["variant"] for run in result["runs"]]
    assert names[0] == "as advised" and "Tree" in names and "LL128" not in names
    assert result["failed"] == [{"world_size": 2, "variant": "LL128", "error": "no algorithm/protocol available"}]
    said = capsys.readouterr().out
    assert "all-reduce by setting" in said and "LL128 failed" in said
    table = said[said.rindex("all-reduce by setting") :]
    assert "26,214,400 bytes" in table and "65,536 bytes" not in table  # DDP's bucket is among the three columns
    lines = {line.split("│")[1].strip(): line for line in table.splitlines() if "│" in line}
    assert lines["LL"].count("400.0 us (0.25 x)") == 3
    assert lines["Simple"].count("110.0 us (=)") == 3  # within the intervals: nothing to be gained is shown


def test_collectives_that_were_measured_stay_when_the_next_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(world: int, sizes: list[int], *arguments: Any, **named: Any) -> dict[str, Any]:
        if world == 4:
            raise RunError("a rank died")
        row = {"bytes": sizes[0], "seconds": {"median": 1e-4}, "algbw_gb_s": 1.0, "busbw_gb_s": 1.0}
        kept = {"kind": "comm", "world_size": world, "backend": "nccl", "conditions": {"warnings": []}}
        return kept | {"collectives": {"all_reduce": [row]}, "environment": {}}

    found = machine(monkeypatch, 4, 18)
    monkeypatch.setattr(comm_report, "survey", lambda: found)
    monkeypatch.setattr(comm, "measure", measure)
    report = tmp_path / "x.json"
    assert main(["comm", "--world-sizes", "2,4", "--sizes", "4096", "--json", str(report)]) == 1
    assert json.loads(report.read_text())["world_size"] == 2 and "a rank died" in capsys.readouterr().err


# --- the account of a step's communication --------------------------------------------------------------------------


def test_ddps_account() -> None:
    def model(**data: int) -> Any:
        return types.SimpleNamespace(_get_ddp_logging_data=lambda: data)

    found = communication.exposed_and_hidden(
        model(backward_comm_time=9_000_000, backward_compute_comm_overlap_time=2_000_000)
    )
    assert found == pytest.approx((0.007, 0.002))
    # The first bucket may be full only when the backward pass is over.
    late = model(backward_comm_time=1_000_000, backward_compute_comm_overlap_time=3_000_000)
    assert communication.exposed_and_hidden(late) == (0.0, 0.001)
    assert communication.exposed_and_hidden(model(rank=0)) is None
    assert communication.exposed_and_hidden(torch.nn.Linear(1, 1)) is None


def test_kernels_of_communication_that_nothing_hides() -> None:
    """Against counting microsecond by microsecond."""
    from torch.autograd import DeviceType

    draw = random.Random(0)
    events, busy = [], {"nccl": set(), "gemm": set()}
    for _ in range(60):
        kind, start, length = draw.choice(["nccl", "gemm"]), draw.randrange(900), draw.randrange(1, 40)
        busy[kind] |= set(range(start, start + length))
        time_range = types.SimpleNamespace(start=start, end=start + length)
        events.append(
            types.SimpleNamespace(name=f"{kind}DevKernel", device_type=DeviceType.CUDA, time_range=time_range)
        )
    whole = types.SimpleNamespace(start=0, end=10_000)
    noise = [
        types.SimpleNamespace(name="ncclAllReduce", device_type=DeviceType.CPU, time_range=whole),
        types.SimpleNamespace(
            name="nccl:all_reduce", device_type=DeviceType.CUDA, time_range=whole, is_user_annotation=True
        ),
    ]
    found = communication.split_of_kernels([*events, *noise], steps=2)
    assert found == pytest.approx(
        {
            "communication_seconds": len(busy["nccl"]) / 2e6,
            "exposed_seconds": len(busy["nccl"] - busy["gemm"]) / 2e6,
        }
    )
    assert communication.split_of_kernels(noise, steps=2) is None


class FakeTrainer:
    """As much of a trainer as the windows use: one rank, whose steps take as long as their number says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.callbacks = 0.0, []
        monkeypatch.setattr(clock.time, "perf_counter", lambda: self.now)
        self.args = types.SimpleNamespace(world_size=1)
        self.state = types.SimpleNamespace(global_step=0)
        self.accelerator = types.SimpleNamespace(backward=lambda: self.spend(2))

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def spend(self, share: float) -> None:
        self.now += share * (self.state.global_step + 1)

    def get_batch_samples(self) -> None:
        self.spend(0.5)

    def compute_loss(self) -> None:
        self.spend(1)

    def step(self) -> None:
        self.get_batch_samples()
        for _ in range(2):  # micro-batches
            self.compute_loss()
            self.accelerator.backward()
        self.spend(0.25)
        for event in ("on_optimizer_step", "on_step_end"):
            self.state.global_step += event == "on_step_end"
            for callback in self.callbacks:
                getattr(callback, event)(None, self.state, types.SimpleNamespace())


def test_only_the_steps_inside_a_window_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = FakeTrainer(monkeypatch)
    found = windows.Windows(trainer, runs=2, warm_up=1, steps=2)
    assert found.total == 6
    for _ in range(6):
        trainer.step()
    phases = {"data": 0.5, "forward": 2.0, "backward": 4.0, "optimizer": 0.25, "other": 0.0}
    expected = [[{name: step * share for name, share in phases.items()} for step in run] for run in ((2, 3), (5, 6))]
    assert found.seconds == expected and len(found.states) == 2


# --- conditions -----------------------------------------------------------------------------------------------------


def test_drift_is_warned_of() -> None:
    cool = {"sm_clock_mhz": 1980, "temperature_c": 45}
    warm = {"sm_clock_mhz": 1755, "temperature_c": 71}
    clock, heat = conditions.drift([cool, cool, None], [cool, warm, None])
    assert clock == "rank 1: the SM clock went from 1980 to 1755 MHz; the figures mix both"
    assert "from 45 to 71 C" in heat
    assert conditions.drift([cool], [{"sm_clock_mhz": 1965, "temperature_c": 54}]) == []
    assert conditions.drift([cool], [{"sm_clock_mhz": None, "temperature_c": None}]) == []


def test_unlike_and_shared_gpus_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [Card(), Card(power_limit=450, processes=(4711,))]
    found = conditions.describe([], [], machine(monkeypatch, 2, "SYS", cards=cards))["warnings"]
    assert found == [
        "the GPUs differ, so the slowest sets the pace (power_limit_w: 700.0, 450.0)",
        "GPU 1 is shared with other processes: 4711",
    ]


def test_a_crowded_cpu_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    for average, words in ((3.7, ["more runnable processes than the 2 CPU cores"]), (2.1, [])):
        monkeypatch.setattr(conditions.os, "getloadavg", lambda average=average: (average, 0.0, 0.0))
        found = conditions.describe([None], [None], hardware.Hardware(**_cpu()))
        assert [warning.partition(":")[0] for warning in found["warnings"]] == words
        assert found["load_average"] == [average, 0.0, 0.0]


# --- ranks that fail ------------------------------------------------------------------------------------------------

REPORT = """\
E1122 00:36:07.367000 12 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0
Failures:
[1]:
  time      : 2026-01-01_00:00:00
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 10)
Root Cause (first observed failure):
[0]:
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 11)
"""


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        (REPORT.format(rank=3, code=-9), RunError, r"^rank 3 of 4 died \(SIGKILL\); the others were stopped$"),
        # Under load both are seen at once: the one that died, and the one that lost its peer.
        (
            "RuntimeError: Connection reset by peer\n" + REPORT.format(rank=1, code=-9).replace("-15", "1"),
            RunError,
            r"^rank 1 of 4 died \(SIGKILL\); the others were stopped$",
        ),
        ("error: [rank 1] no such file\n" + REPORT.format(rank=1, code=2), UserError, r"^\[rank 1\] no such file$"),
        ("error: CUDA ran out of memory\n" + REPORT.format(rank=1, code=1), RunError, "^CUDA ran out of memory$"),
        ("Traceback ...\nValueError: broken\n" + REPORT.format(rank=1, code=1).replace("-15", "1"), RunError, "broken"),
        (
            "Traceback ...\nValueError: broken\n" + REPORT.format(rank=1, code=1),
            RunError,
            r"code 1: Trace[^:]*: broken\s*$",
        ),
    ],
)
def test_the_first_failure_is_reported(said: str, kind: type, words: str) -> None:
    found = launch._failure(1, said, 4)
    assert type(found) is kind
    with pytest.raises(kind, match=words):
        raise found


# --- the study ------------------------------------------------------------------------------------------------------


def test_models_of_the_study() -> None:
    small, large = study.MODELS
    assert small.widths[1:-1] == (256, 128, 64) and large.widths[1:-1] == (1024, 1024, 512, 512, 256)
    for model, stated in ((small, 258_000), (large, 6_900_000)):
        built = dense(list(model.widths), model.dropout)
        assert sum(parameter.numel() for parameter in built.parameters()) == model.parameters
        nearest = [abs(model.parameters + step * model.widths[1] - stated) for step in (-1, 0, 1)]
        assert nearest[1] == min(nearest)  # no other input width comes nearer
        dropouts = [layer.p for layer in built if isinstance(layer, torch.nn.Dropout)]
        assert dropouts == [model.dropout] * (len(model.widths) - 2)
        assert isinstance(built[-1], torch.nn.Linear)
        assert list(model.batches) == [row.batch for row in published.TABLES[model.name]]


def test_published_ratios_follow_from_its_rates_and_its_contradictions_are_there() -> None:
    for rows in published.TABLES.values():
        for row in rows:
            assert row.two / row.one == pytest.approx(row.speed_up, abs=0.006)
            assert row.two / row.one / 2 == pytest.approx(row.efficiency, abs=0.006)
            if row.step_ms:
                assert [row.batch / row.one * 1e3, row.batch / row.two * 1e3] == pytest.approx(row.step_ms, rel=0.01)
    found = "\n".join(published.contradictions())
    for words in ("58-85 ms per step", "only 10.4 ms", "88-135 ms", "21.7 ms, but the table has 28.5", "NTHREADS=16"):
        assert words in found


def figure(seconds: float) -> dict[str, Any]:
    return {"mean": seconds, "median": seconds, "ci95": [0.9 * seconds, 1.1 * seconds], "runs": 5, "n": 9, "removed": 1}


def measured(step: float, ranks: int) -> dict[str, Any]:
    parts = {name: figure(step / 4) for name in ("forward", "backward", "optimizer", "other")} | {"step": figure(step)}
    sent = (
        {"exposed": figure(step / 10), "hidden": figure(step / 20)} if ranks > 1 else {"exposed": None, "hidden": None}
    )
    own = {"seconds": parts | sent, "memory_gib": 1.5, "utilization": 0.87}
    return {"step_seconds": figure(step), "ranks": [own] * ranks, "conditions": {"warnings": ["it grew warm"]}}


def whole_study(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found = machine(monkeypatch, 2, 18)
    cases = [(model.name, batch) for model in study.MODELS for batch in model.batches]
    runs = {1: {case: measured(0.010, 1) for case in cases}, 2: {case: measured(0.008, 2) for case in cases}}
    modes = [
        {"name": name, "environment": env, "rows": study.rows(study.MODELS, runs)} for name, env in study.modes(found)
    ]
    return {
        "kind": "study",
        "date": "2026-01-01",
        "versions": {"torch": "2"},
        "hardware": found.to_dict(),
        "topology": hardware.topology_line(found),
        "protocol": {"runs": 5, "steps": 100, "warm_up": 10, "precision": "float32"},
        "models": [
            {"name": model.name, "widths": model.widths, "parameters": model.parameters, "dropout": model.dropout}
            for model in study.MODELS
        ],
        "modes": modes,
        "lora": {"left_out": "no GPU"},
    }


def test_what_the_study_has_measured_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second number of ranks fails; the first is in the file."""
    cases = [(model.name, batch) for model in study.MODELS for batch in model.batches]

    def measure(models: Any, world: int, *rest: Any) -> dict[tuple[str, int], dict[str, Any]]:
        if world > 1:
            raise RunError("a rank died")
        return {case: measured(0.010, 1) for case in cases}

    monkeypatch.setattr(study, "measure", measure)
    monkeypatch.setattr(study, "survey", lambda: hardware.Hardware(**_cpu()))
    options = argparse.Namespace(world_sizes=[1, 2], models=["258K", "6.9M"], runs=1, steps=1, out=tmp_path)
    with pytest.raises(RunError):
        list(study.run(options, []))
    rows = json.loads((tmp_path / "study.json").read_text())["modes"][0]["rows"]
    assert [(row["model"], row["batch"]) for row in rows] == cases and {row["world_size"] for row in rows} == {1}


def test_rates_and_ratios_of_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    found = whole_study(monkeypatch)
    assert [mode["name"] for mode in found["modes"]] == ["peer access", "NCCL_P2P_DISABLE=1"]
    assert found["modes"][1]["environment"] == {"NCCL_NVLS_ENABLE": "0", "NCCL_P2P_DISABLE": "1"}
    one, two = found["modes"][0]["rows"][:2]
    assert (one["world_size"], one["samples_per_second"], one["speed_up"]) == (1, 1600.0, 1.0)
    assert two["samples_per_second"] == 2000.0 and two["speed_up"] == 1.25 and two["efficiency"] == 0.625
    assert two["exposed_communication_fraction"] == pytest.approx(0.1)
    bridge = study.modes(machine(monkeypatch, 2, "PHB", peers=False))
    assert bridge == [("no peer access", {"NCCL_P2P_DISABLE": "1"})]
    assert study.modes(hardware.Hardware(**_cpu())) == [("gloo on this CPU", {})]


def test_tables_of_the_study_stand_beside_the_published(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = whole_study(monkeypatch)
    study_report.show(found)
    study_report.write(found, tmp_path)
    text = (tmp_path / "study.md").read_text()
    assert "| 16 | 2 | 2,000 | 8.00 +- 0.80 | 1.25 | 62% | 0.80 / 0.40 (10%) | 1.50 | 87% | 1 |" in text
    assert "| 128 | 16,883 | 12,345 | 0.73 | 37% |" in text and "6,900,490 parameters" in text
    assert "the overheads add up to 58-85 ms" in text and "- it grew warm" in text and "Left out: no GPU." in text
    assert "A CPU run" not in text
    assert "A CPU run" in study_report.markdown(found | {"hardware": {"device": "cpu", "cpu_cores": 2}})
    assert json.loads((tmp_path / "study.json").read_text())["kind"] == "study"
    said = capsys.readouterr().out
    assert "published, 2 x GPU" in said and "peer access, rank 1 of 2" in said and "…" not in said
    drawn = sorted(path.name for path in tmp_path.glob("*.png"))
    if importlib_util.find_spec("matplotlib") is None:
        assert drawn == [] and "finetune[plots]" in said
    else:
        assert drawn == ["study-throughput.png", "study-timeline-258K.png", "study-timeline-6.9M.png"]
        assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in drawn)


def test_a_study_of_lora_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No dense model, so nothing to plot."""
    row = {"shape": "llama-1.2b", "mode": "one GPU", "world_size": 1, "tokens_per_second_per_gpu": 80816.4}
    row |= {"step_seconds": {"median": 0.3989}, "efficiency": 1.0, "exposed_communication_fraction": 0.0}
    lora = {"rows": [row | {"memory_gib": 18.73}]}
    study_report.write(whole_study(monkeypatch) | {"models": [], "modes": [], "lora": lora}, tmp_path)
    text = (tmp_path / "study.md").read_text()
    assert "| llama-1.2b | one GPU | 1 | 80,816 | 398.9 | 100.0% | 0.0% | 18.7 |" in text
    assert not list(tmp_path.glob("*.png"))


def test_a_benchmarks_model_is_built_by_another_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In this one it would stay on the GPU whose memory is measured."""
    from benchmarks import models

    started: list[list[str]] = []
    monkeypatch.setattr(models.subprocess, "run", lambda command, **kw: started.append([str(one) for one in command]))
    assert models.build(tmp_path / "m", "llama-1m", tmp_path / "rows.jsonl") == tmp_path / "m"
    expected = ["-m", "benchmarks.models", str(tmp_path / "m"), "llama-1m", str(tmp_path / "rows.jsonl")]
    assert [command[1:] for command in started] == [expected]
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").touch()
    models.build(tmp_path / "m", "llama-1m", tmp_path / "rows.jsonl")  # it is there
    assert len(started) == 1


def test_names_of_models() -> None:
    assert study.chosen(["6.9M", "llama-1.2b"]) == ([study.MODELS[1]], ["llama-1.2b"])
    assert study.chosen(None) == (list(study.MODELS), list(study_lora.SHAPES))
    with pytest.raises(UserError, match="258K, 6.9M, llama-1.2b"):
        study.chosen(["7B"])


def test_shapes_for_lora_are_there_and_their_configuration_is_sound(tmp_path: Path) -> None:
    from benchmarks.models import SHAPES

    assert set(study_lora.SHAPES) <= set(SHAPES)
    corpus = study_lora.documents(tmp_path / "train.jsonl")
    config = load(study_lora.configuration(tmp_path, corpus, 8), command="bench")
    assert config.data.packing and config.data.pack_length == 16384 and config.training.global_batch_size == 8
    lengths = [len(json.loads(line)["text"].split()) for line in corpus.read_text().splitlines()]
    assert min(lengths) >= 32 and max(lengths) <= 2048 and 450 < sum(lengths) / len(lengths) < 650
    left_out = study_lora.measure(["llama-1.2b"], [1], [], 5, 100, hardware.Hardware(**_cpu()), lambda found: None)
    assert "no GPU" in left_out["left_out"]


# --- bars -----------------------------------------------------------------------------------------------------------


def test_a_bar_is_as_long_as_the_step() -> None:
    seconds = {"data": figure(0.001), "forward": figure(0.010), "backward": figure(0.020), "optimizer": figure(0.002)}
    one = timeline.bar("rank 0", seconds | {"other": figure(0.0005), "exposed": figure(0.004), "hidden": figure(0.006)})
    assert sum(one.parts.values()) == pytest.approx(33.5)
    assert one.parts["backward"] == pytest.approx(16.0) and one.parts["exposed communication"] == pytest.approx(4.0)
    assert one.hidden == pytest.approx(6.0)
    drawn = timeline.pieces(one, 33.5)
    assert sum(length for _, length in drawn) == timeline.WIDTH and all(length >= 0 for _, length in drawn)
    alone = timeline.bar("rank 0", seconds | {"exposed": None, "hidden": None})
    assert alone.parts["exposed communication"] == alone.hidden == 0 and alone.parts["backward"] == pytest.approx(20.0)


def test_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib_util, "find_spec", lambda name: None)
    assert timeline.write(tmp_path / "x.png", "title", []) is False
    assert "pip install 'finetune[plots]'" in capsys.readouterr().out and not list(tmp_path.iterdir())


# --- the command line -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "comm, compute, step, study"),
        (["speed"], "unknown benchmark: `speed`"),
        (["comm", "--world-sizes", "two"], "--world-sizes: expected integers of at least 1, such as 1,2,4, got 'two'"),
        (["comm", "--runs", "0"], "--runs: expected an integer of at least 1, got '0'"),
        (["comm", "--world-sizes", "1"], "two ranks or more"),
        (["comm", "--settings"], "has no GPU"),
        (["compute", "--sizes", "4096"], "unknown option: `--sizes`"),
        (["study", "--world-sizes", "2"], "Add 1"),
        (["study", "--models", "8B"], "258K"),
        (["step", "--training.learing_rate", "1"], "learning_rate"),
        (["step", "--world-sizes"], "expected one argument"),
    ],
)
def test_bad_input_is_reported_and_nothing_starts(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "ranks", lambda *arguments, **named: pytest.fail("ranks were started"))
    assert main(words) == 2
    assert expected in capsys.readouterr().err


def test_options_and_configuration_are_kept_apart() -> None:
    words = ["--runs", "3", "--config", "my.yaml", "--training.seed", "7", "--json", "x.json", "--sizes=4096,65536"]
    options, rest = parse("comm", words)
    assert isinstance(options, argparse.Namespace)
    assert (options.runs, options.steps, options.sizes, options.json) == (3, 100, [4096, 65536], Path("x.json"))
    assert rest == ["--config", "my.yaml", "--training.seed", "7"]


@pytest.mark.process
def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from finetune.cli import main; main(['bench', 'comm', '--help']); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--settings" in done.stdout


# --- several machines -------------------------------------------------------------------------------------------------


@pytest.fixture
def two_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is a rank of a launcher, on the first of two machines."""
    me = distributed.Ranks(rank=0, local_rank=0, world_size=2, local_world_size=1)
    monkeypatch.setattr(distributed, "ranks", lambda: me)


@pytest.mark.parametrize(
    ("options", "word"), [(["--world-sizes", "2"], "--world-sizes"), (["--settings"], "--settings"),
                          (["--config", "my.yaml"], "configuration")]
)  # fmt: skip
def test_a_launched_comm_refuses_what_it_does_not_do(two_machines: None, options: list[str], word: str) -> None:
    with pytest.raises(UserError, match=f"got .*{word}.*several machines"):
        command.run(["comm", *options])


def test_a_curve_of_two_machines_is_for_two_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    rows = [{"bytes": size, "seconds": {"median": size / 1e9}} for size in (4096, 65536)]
    found = {"world_size": 2, "backend": "gloo", "environment": {}, "collectives": {"all_reduce": rows}}
    measurements.save_comm(found | {"machines": 2}, "cpu")
    assert measurements.find_comm(2, "gloo", "cpu", {}, machines=2)[0] is not None
    assert measurements.find_comm(2, "gloo", "cpu", {})[0] is None
    curve, why = measurements.find_comm(2, "gloo", "cpu", {}, machines=3)
    assert curve is None and "on 3 machines" in why and "torchrun" in why
