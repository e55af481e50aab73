"""How two runs are compared, on handmade files, against torch's own products of all tensors at once."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from finetune.errors import RunError
from finetune.parity import command as parity


def run(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    losses: tuple[float, ...] = (2.0, 1.5),
    norms: tuple[float, ...] = (1.0, 1.0),
    dtype: str = "float32",
) -> Path:
    """The files of a run of two steps; its weights are its gradients."""
    folder.mkdir()
    for name in ("gradient", "weights"):
        save_file(tensors, folder / f"{name}.safetensors")
    save_file({"norms": torch.tensor(norms)}, folder / "norms.safetensors")
    record = {"losses": losses, "eval_loss_after": None, "dtype": dtype, "hardware": {"device": "cpu"}}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def test_the_documentation_has_the_bounds() -> None:
    text = (Path(__file__).parents[3] / "docs" / "different-loss.md").read_text()
    table = re.findall(r"\| ([\de;. -]+) \| ([\de;. -]+) \|$", text, re.M)[:4]
    for place, kind in enumerate(("float32", "bfloat16")):
        given, one = [float(number) for row in table for number in row[place].split(";")], parity.TOLERANCES[kind]
        assert given == pytest.approx((one.ratio, 1 - one.cosine, one.first_loss, one.loss, one.norm, one.weights))


def test_pieces_add_up_to_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "PIECE", 7)
    torch.manual_seed(0)
    one = {"a": torch.randn(5, 9), "b": torch.randn(3).bfloat16(), "c": torch.zeros(2)}
    two = {name: tensor * 2 + (0.1 if name == "b" else 0) for name, tensor in one.items()}
    found = parity.compare(run(tmp_path / "1", one), run(tmp_path / "2", two), 2)
    a, b = (torch.cat([tensors[name].double().flatten() for name in "abc"]) for tensors in (one, two))
    assert found.ratio == pytest.approx(float(b.norm() / a.norm()), rel=1e-12)
    assert found.cosine == pytest.approx(float(a @ b / a.norm() / b.norm()), rel=1e-12)
    assert found.weights == pytest.approx(float((a - b).norm() / a.norm()), rel=1e-12)
    assert sorted(name for name, *_ in found.tensors) == ["a", "b"]  # none for a tensor without a gradient
    assert "the gradient is 1.99" in found.failures[0] and "the trained weights differ" in found.failures[1]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_fail(tmp_path: Path, wrong: float) -> None:
    tensors = {"a": torch.tensor([1.0, wrong, 2.0])}
    found = parity.compare(run(tmp_path / "1", tensors), run(tmp_path / "2", tensors), 2)
    assert any("the gradient is" in failure for failure in found.failures)
    right = {"a": torch.ones(3)}
    lost = parity.compare(run(tmp_path / "3", right), run(tmp_path / "4", right, losses=(2.0, math.nan)), 2)
    assert [failure.split(" differs")[0] for failure in lost.failures] == ["a later step's loss"]


FIRST, LATER, NORM = "the first step's loss", "a later step's loss", "a step's gradient norm"


@pytest.mark.parametrize(
    ("dtype", "losses", "norms", "expected"),
    [
        # The largest differences between correct runs of SmolLM2 (benchmarks/results/2026-11-28-parity-noise-cpu.json).
        ("bfloat16", (1.7e-3, 3.7e-3), (1.3e-3, 1.4e-2), []),
        ("bfloat16", (5.5e-3, 2.3e-3), (3.6e-3, 3.4e-3), [FIRST]),
        ("bfloat16", (0.0, 1.5e-2), (0.0, 4.3e-2), [NORM, LATER]),
        ("float32", (9e-8, 5e-8), (9e-8, 5e-7), []),
        ("float32", (2e-5, 2e-5), (0.0, 2e-4), [NORM, FIRST, LATER]),
    ],
)
def test_16_bits_may_round_differently(
    tmp_path: Path, dtype: str, losses: tuple[float, ...], norms: tuple[float, ...], expected: list[str]
) -> None:
    tensors = {"a": torch.ones(3)}
    moved = (2.0 * (1 + losses[0]), 1.5 * (1 + losses[1])), (1 + norms[0], 1 + norms[1])
    one, two = run(tmp_path / "1", tensors, dtype=dtype), run(tmp_path / "2", tensors, *moved, dtype=dtype)
    failures = parity.compare(one, two, 2).failures
    assert [failure.split(" differs")[0] for failure in failures] == expected


def test_other_tensors_are_refused(tmp_path: Path) -> None:
    one, two = run(tmp_path / "1", {"a": torch.ones(2)}), run(tmp_path / "2", {"b": torch.ones(2)})
    with pytest.raises(RunError, match="different tensors"):
        parity.compare(one, two, 2)


# Figures as wide as they get: signs, exponents of three digits, and three digits of ranks.
WIDE = parity.Comparison(
    world_size=128,
    ratio=1 - 1.25e-100,
    cosine=0.5,
    norm=2.5e-101,
    loss=3.5e-102,
    eval_loss=4.5e-103,
    weights=5.5e-104,
    tensors=(),
    failures=("the gradient is 2.0000 times the reference's",),
)
EQUAL = replace(WIDE, world_size=2, ratio=1.0 + 1.5e-3, eval_loss=None, failures=())


def test_the_table_is_complete_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich shortens what does not fit to "…", the headline figure (the gradient's ratio) first."""
    printed = io.StringIO()
    console = Console(file=printed, width=80, color_system=None)
    monkeypatch.setattr(parity, "console", lambda: console)
    monkeypatch.setattr(parity, "print_line", lambda *words, **style: None)
    parity.print_comparison({"world_size": 1, "steps": 4}, [WIDE, replace(WIDE, ratio=1e100), EQUAL])
    lines = printed.getvalue().splitlines()
    assert "…" not in printed.getvalue() and max(map(len, lines)) <= 80
    cells = [line.split() for line in lines]
    wide = ["5.0e-01", "2.5e-101", "3.5e-102", "4.5e-103", "5.5e-104", "not", "equal"]
    assert ["128", "+0.0e+00", *wide] in cells and ["128", "+1.0e+100", *wide] in cells
    assert ["2", "+1.5e-03", *wide[:3], "-", "5.5e-104", "equal"] in cells
