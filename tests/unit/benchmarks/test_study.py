"""Tests of benchmarks/study."""

from __future__ import annotations

import argparse
import json
from importlib import util as importlib_util
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.study import command as study
from benchmarks.study import lora as study_lora
from benchmarks.study import published
from benchmarks.study import report as study_report
from benchmarks.study.rank import dense
from finetune.bench import launch
from finetune.config import load
from finetune.errors import RunError, UserError
from finetune.runtime.machine import hardware
from tests.helpers.bench import figure, machine, on_cpu


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
    monkeypatch.setattr(study, "survey", lambda: hardware.Hardware(**on_cpu()))
    options = argparse.Namespace(world_sizes=[1, 2], models=["258K", "6.9M"], runs=1, steps=1, out=tmp_path)
    with pytest.raises(RunError):
        list(study.study(options))
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
    assert study.modes(hardware.Hardware(**on_cpu())) == [("gloo on this CPU", {})]


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
        assert drawn == [] and ".[plots]" in said
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
    left_out = study_lora.measure(["llama-1.2b"], [1], [], 5, 100, hardware.Hardware(**on_cpu()), lambda found: None)
    assert "no GPU" in left_out["left_out"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--world-sizes", "2"], "Add 1"),
        (["--models", "8B"], "258K"),
        (["--run", "3"], "Nearest is --runs. See python -m benchmarks.study --help."),
    ],
)
def test_the_study_refuses_bad_input(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "ranks", lambda *arguments, **named: pytest.fail("ranks were started"))
    assert study.main(words) == 2
    assert expected in capsys.readouterr().err
