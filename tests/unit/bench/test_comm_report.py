"""Tests of finetune/bench/comm_report.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.bench import comm, comm_report, command
from finetune.bench.command import main
from finetune.errors import RunError, UserError
from finetune.measure import measurements
from finetune.runtime.ranks import distributed
from tests.helpers.bench import machine


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
