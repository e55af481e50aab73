"""The line of a mode, the longest row on it, and which mode is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from finetune.config.rules import Mode
from finetune.engine.monitoring.metrics import ModelSize, training_flops
from finetune.measure import activations
from finetune.measure.activations import Line, Measured, Point, Rows

GIB = 2**30
PLAIN, FULL = Mode(gradient_checkpointing=False, tiled_mlp=False), Mode(gradient_checkpointing=True, tiled_mlp=False)
FRUGAL = Mode(gradient_checkpointing="offload", tiled_mlp=True)


def measured(mode: Mode, gib_per_1000: float, speed: float, *, held: float = 16.0) -> Measured:
    """On a device where a model holds `held` GiB, and a pass one more unless MLPs are tiled, with `speed` tokens/s at
    1000 tokens, of which 4000 take 8 times as long as 1000: attention."""
    further = 0.0 if mode.tiled_mlp else 1.0
    points = tuple(
        Point(tokens=tokens, peak_bytes=(held + further + gib_per_1000 * tokens / 1000) * GIB, seconds=seconds / speed)
        for tokens, seconds in ((1000, 1000.0), (4000, 8000.0))
    )
    return Measured(mode=mode, held_bytes=held * GIB, points=points, square_cost=1 / 2000)


THREE = [measured(PLAIN, 4.0, 1000), measured(FULL, 0.5, 800), measured(FRUGAL, 0.125, 700, held=17.0)]


def rows(longest: int, most: int = 0) -> Rows:
    return Rows(most=most or longest, tokens=longest, squares=longest**2)


def test_two_lengths_give_the_line_and_the_longest_row() -> None:
    line = THREE[1].line
    assert line == Line(fixed_bytes=17 * GIB, bytes_per_token=0.5 * GIB / 1000)
    assert line.longest(65 * GIB) == 96_000 and line.longest(10 * GIB) == 0
    assert Line(fixed_bytes=1.0, bytes_per_token=0.0).longest(2.0) is None
    one = Measured(
        mode=PLAIN, held_bytes=10.0, points=(Point(tokens=10, peak_bytes=40.0, seconds=1.0),), square_cost=0.0
    )
    assert one.line == Line(fixed_bytes=10.0, bytes_per_token=3.0)  # what is constant counts as growing: never too low
    assert Measured(mode=PLAIN, held_bytes=10.0, points=(), square_cost=0.0).line is None


# Llama 3.1's 8 B on an H100 (benchmarks/results/2026-11-26-long-rows-h100.json): what is held, peaks at 2,048 and at
# more tokens, and of a run with 65,536.
@pytest.mark.parametrize(
    ("held", "first", "tokens", "last", "gib"),
    [
        (16698532864, 17348555776, 25_104, 19514678784, 22.2656),
        (6074075136, 6671407104, 21_120, 8388740608, 12.3091),
    ],
    ids=["LoRA", "QLoRA"],
)
def test_the_peak_of_tiled_mlps_is_predicted_within_1_percent(
    held: float, first: float, tokens: int, last: float, gib: float
) -> None:
    points = tuple(Point(tokens=n, peak_bytes=peak, seconds=1.0) for n, peak in ((2048, first), (tokens, last)))
    line = Measured(mode=FRUGAL, held_bytes=held, points=points, square_cost=0.0).line
    assert line is not None and line.peak_bytes(65_536) / GIB == pytest.approx(gib, rel=0.01)


def test_attention_grows_with_the_squared_length() -> None:
    """1000 tokens take 1 s and 4000 take 8 s: 2/3 s per 1000 tokens, and 1/3 s per 1000^2."""
    one = measured(PLAIN, 1.0, 1000)
    assert one.tokens_per_second(8000, 8000**2) == pytest.approx(8000 / (8 * 2 / 3 + 64 / 3))
    assert one.tokens_per_second(8000, 8 * 1000**2) == pytest.approx(1000)  # eight documents of 1000
    assert one.tokens_per_second(1000, 1000**2) == pytest.approx(1000)


# Llama 3.1's 8 B, LoRA on an H100 (benchmarks/results/2026-11-26-long-rows-h100.json): the longer measured point, and
# the seconds of a step with 65,536 tokens.
@pytest.mark.parametrize(
    ("tokens", "seconds", "measured"), [(17_960, 2.0425, 13.165), (25_104, 3.3477, 13.550)], ids=["true", "tiled"]
)
def test_the_time_of_a_longer_row_is_predicted_within_6_percent(tokens: int, seconds: float, measured: float) -> None:
    size = ModelSize(
        parameters=8_072_204_288,
        active_parameters=8_072_204_288,
        matmul_parameters=7_546_863_616,
        trainable_parameters=41_943_040,
        active_trainable_parameters=41_943_040,
        layers=32,
        hidden=4096,
        attention=4096,
    )
    cost = training_flops(size, tokens=0, squared_lengths=1) / training_flops(size, tokens=1, squared_lengths=0)
    points = (Point(tokens=2048, peak_bytes=1.0, seconds=0.5), Point(tokens=tokens, peak_bytes=2.0, seconds=seconds))
    one = Measured(mode=FULL, held_bytes=0.0, points=points, square_cost=cost)
    assert 65_536 / one.tokens_per_second(65_536, 65_536**2) == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize(("tokens", "mode"), [(5_000, PLAIN), (20_000, FULL), (90_000, FULL), (300_000, FRUGAL)])
def test_the_fastest_that_holds_the_rows_is_taken(tokens: int, mode: Mode) -> None:
    chosen = activations.fastest(THREE, rows(tokens), 64 * GIB)
    assert chosen is not None and chosen.mode == mode
    assert activations.remedy(THREE, rows(tokens), 64 * GIB) == mode.text


def test_of_equally_fast_modes_the_first_is_taken() -> None:
    close = [measured(PLAIN, 1.0, 990), measured(FULL, 1.0, 1000)]
    chosen = activations.fastest(close, rows(1000), 64 * GIB)
    assert chosen is not None and chosen.mode == PLAIN


def test_a_row_that_no_mode_holds_is_divided_over_gpus() -> None:
    """17 GiB and a GiB per 8000 tokens: 376,000 fit in 64."""
    assert activations.fastest(THREE, rows(700_000), 64 * GIB) is None
    text = f"{FRUGAL.text}, with training.context_parallel: 2 on 2 GPUs"
    assert activations.remedy(THREE, rows(700_000), 64 * GIB) == text
    assert FRUGAL.text == "training.gradient_checkpointing: offload and model.tiled_mlp: true"
    assert "context_parallel: 8" in (activations.remedy(THREE, rows(3_000_000), 64 * GIB) or "")
    assert activations.remedy(THREE, rows(3_100_000), 64 * GIB) is None
    assert activations.remedy([measured(FULL, 1.0, 1, held=70.0)], rows(10), 64 * GIB) is None  # the model fills it


def test_what_the_host_cannot_keep_does_not_fit() -> None:
    """Neither on one GPU nor divided over those of one machine, which share its memory."""
    small = replace(THREE[2], host_tokens=200_000)
    assert small.longest(64 * GIB) == 200_000 and small.longest(20 * GIB) == 24_000
    assert not small.fits(300_000, 64 * GIB) and small.fits(150_000, 64 * GIB)
    text = activations.remedy([THREE[1], small], rows(300_000), 64 * GIB)
    assert text == f"{FULL.text}, with training.context_parallel: 4 on 4 GPUs"


def test_the_report_has_points_line_and_prediction() -> None:
    found = activations.to_dict(THREE, rows(300_000), 64 * GIB)
    first, _, last = found["modes"]
    assert (first["fits"], last["fits"]) == (False, True)
    assert [point["tokens"] for point in last["points"]] == [1000, 4000]
    assert last["predicted_peak_bytes"] == pytest.approx((17 + 300 / 8) * GIB)
    assert last["longest_row_tokens"] == 376_000
    assert Measured.from_dict(last) == THREE[2]
    assert last["mode"] == {"gradient_checkpointing": "offload", "tiled_mlp": True}
