"""`finetune bench` on two gloo ranks: the shipped commands, small."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from finetune.bench import launch as ranks
from finetune.errors import RunError
from finetune.measure import measurements
from finetune.runtime import subprocesses
from tests.helpers import launch, warm

pytestmark = pytest.mark.process


def bench(folder: Path, *words: str, module: str = "finetune.bench") -> dict[str, Any]:
    """Run the command and return its --json."""
    given = [*words, "--json", str(folder / "bench.json")]
    done = launch.command_with_ranks(module, given, cache=folder, kind="transformers")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "bench.json").read_text()) | {"said": done.stdout}


def test_collectives(tmp_path: Path) -> None:
    found = bench(tmp_path, "comm", "--sizes", "4096,65536", "--runs", "2", "--steps", "4")
    assert (found["kind"], found["world_size"], found["backend"]) == ("comm", 2, "gloo")
    assert found["environment"] == {"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1"}
    assert found["hardware"]["device"] == "cpu" and found["conditions"]["before"] == [None, None]
    assert list(found["collectives"]) == ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]
    for name, rows in found["collectives"].items():
        assert [row["bytes"] for row in rows] == [4096, 65536]
        for row in rows:
            seconds = row["seconds"]
            assert seconds["runs"] == 2 and seconds["n"] + seconds["removed"] == 8 and len(seconds["ci95"]) == 2
            assert row["algbw_gb_s"] == pytest.approx(row["bytes"] / seconds["median"] / 1e9)
            factor = 1.0 if name in ("all_reduce", "broadcast") else 0.5  # of two ranks
            assert row["busbw_gb_s"] == pytest.approx(factor * row["algbw_gb_s"])
    assert "reduce-scatter" in found["said"] and "65,536" in found["said"] and "gloo" in found["said"]
    assert not list(tmp_path.rglob("comm-gloo-*"))  # two sizes are no curve to predict runs from


def test_a_whole_curve_is_kept_for_the_scores_of_runs(tmp_path: Path) -> None:
    bench(tmp_path, "comm", "--runs", "1", "--steps", "2")
    (kept,) = tmp_path.rglob("comm-gloo-*-2.json")
    assert measurements.read_comm(kept)[2].points[0][0] == 4096


DIES = """
import os, signal
from finetune.runtime.ranks import distributed
from finetune.bench import rank

def measure(request):
    if distributed.ranks().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rank.barrier()

raise SystemExit(rank.run_rank(measure))
"""


def test_a_rank_that_dies_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    environment = launch.environment(tmp_path)
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    with pytest.raises(RunError, match=r"^rank 1 of 2 died \(SIGKILL\); the others were stopped$"):
        ranks.ranks("dies", 2, {}, title="a rank that dies", environment=environment)


def test_parts_of_a_training_step(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    found = bench(
        *(tmp_path, "step", "--world-sizes", "2", "--runs", "2", "--steps", "3"),
        *("--model.model_name_or_path", str(tiny_model), "--data.train_file", str(tiny_data / "train.jsonl")),
        *("--model.backend", "transformers", "--training.global_batch_size", "8"),
        *("--training.per_device_train_batch_size", "2"),  # two micro-batches a rank: both are in the parts
    )
    (run,) = found["runs"]
    assert run["batch"] == {"per_device": 2, "accumulation": 2, "global_batch_size": 8}
    assert 0 < run["exposed_communication_fraction"] < 1 and len(run["ranks"]) == 2
    for one in run["ranks"]:
        seconds = one["seconds"]
        parts = ("data", "forward", "backward", "optimizer", "other")
        assert all(seconds[name]["n"] + seconds[name]["removed"] == 6 for name in (*parts, "step"))
        assert all(seconds[name]["mean"] > 0 for name in parts)
        assert seconds["exposed"]["mean"] > 0 and seconds["hidden"]["mean"] >= 0
        assert one["peak_memory_gib"] > 0.1
    assert run["tokens_per_second_per_gpu"] * 2 * run["ranks"][0]["seconds"]["step"]["median"] == pytest.approx(
        run["tokens_per_step"]
    )
    assert "rank 1 of 2" in found["said"] and "exposed communication" in found["said"]


def test_the_study_on_a_cpu_says_what_it_is(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("--models", "258K,llama-1.2b", "--world-sizes", "1,2", "--runs", "1", "--steps", "3", "--out", str(out))
    found = bench(tmp_path, *words, module="benchmarks.study")
    rows = found["modes"][0]["rows"]
    assert [(row["batch"], row["world_size"]) for row in rows] == [(b, w) for b in (16, 32, 64, 128) for w in (1, 2)]
    for row in rows:
        assert row["samples_per_second"] == pytest.approx(row["batch"] / row["step_seconds"]["median"])
        assert len(row["ranks"]) == row["world_size"] and row["ranks"][0]["memory_gib"] > 0
        assert (row["ranks"][0]["seconds"]["exposed"] is not None) == (row["world_size"] == 2)
    text = (out / "study.md").read_text()
    assert "A CPU run" in text and "Left out: there is no GPU" in text and "| 128 | 16,883 | 12,345 |" in text
    assert json.loads((out / "study.json").read_text())["modes"] == found["modes"]


def test_one_rank_of_the_study_in_ddp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """DDP accounts for its communication, of which plain PyTorch has none; advice takes each for its ranks."""
    from benchmarks.study import advise as dense
    from finetune.measure.predict import Work
    from finetune.runtime.machine.hardware import survey

    monkeypatch.setattr(ranks, "_follow", warm.follow)
    monkeypatch.setenv("PYTHONPATH", launch.environment(tmp_path)["PYTHONPATH"])
    monkeypatch.setattr(dense, "EFFORT", argparse.Namespace(runs=1, steps=3))
    asked, measure = [], dense.study.measure

    def watched(models: Any, *rest: Any, ddp: bool) -> Any:
        found = measure(models, *rest, ddp=ddp)
        (one,) = found.values()
        asked.append((models[0].batches, ddp, one["ranks"][0]["seconds"]["exposed"] is not None))
        return found

    monkeypatch.setattr(dense.study, "measure", watched)
    found = dense.candidates(dense.chosen("258K", 16), [1, 2, 3], survey())
    assert asked == [((16,), False, False), ((8,), True, True)]
    assert [isinstance(found[world], Work) for world in (1, 2, 3)] == [True, True, False]


@pytest.mark.campaign
def test_the_lora_rows_of_the_study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On ranks of a CPU, told that they are GPUs: a small shape in short packs, through the real trainer."""
    from dataclasses import replace

    from benchmarks.study import lora as study_lora
    from finetune.runtime.machine.hardware import survey

    monkeypatch.setattr(subprocesses, "run", warm.run_command)
    monkeypatch.setattr(ranks, "_follow", warm.follow)
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", launch.environment(tmp_path)["PYTHONPATH"])
    monkeypatch.setattr(study_lora, "PACK", 2048)
    monkeypatch.setattr(study_lora, "DOCUMENTS", 60)
    machine = replace(survey(), device="cuda", count=2)
    kept: list[int] = []

    def keep(found: dict[str, Any]) -> None:
        kept.append(len(found["rows"]))

    found = study_lora.measure(["llama-1m"], [1, 2], [("gloo", {})], 1, 1, machine, keep)["rows"]
    assert kept == [1, 2]
    assert [(row["mode"], row["world_size"]) for row in found] == [("one GPU", 1), ("gloo", 2)]
    assert found[0]["efficiency"] == 1 and all(row["tokens_per_second_per_gpu"] > 0 for row in found)
    assert found[0]["trainable_parameters"] == found[1]["trainable_parameters"] > 0
    assert study_lora.measure(["llama-1m"], [1], [], 1, 1, survey(), keep)["left_out"].startswith("there is no GPU")
