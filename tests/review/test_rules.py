"""Each rule on runs of plain numbers: just beyond its threshold and just short of it; and what findings say."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from finetune.review import divergence, events
from finetune.review.rules import RULES, learning, memory, ranks, speed, straggler
from finetune.review.run import Run
from finetune.review.verdict import findings, verdict
from finetune.runtime import tags
from tests.review import synthetic
from tests.review.synthetic import losses, run


def fired(one: Run, *others: Run) -> list[str]:
    return sorted(found.rule for found in findings(one, others))


def evaluation(*values: float) -> dict[str, tuple[list[int], list[float]]]:
    return {"eval_loss": ([20 * (place + 1) for place in range(len(values))], list(values))}


def trained(before: float, after: float) -> dict[str, tuple[list[int], list[float]]]:
    """A run that is evaluated before and after training."""
    return {"eval_loss": ([0, 200], [before, after])}


def noisy(*levels: float) -> np.ndarray:
    """200 losses about these levels, with a noise of a tenth, after a first one of 1."""
    values = np.interp(np.arange(200), np.linspace(0, 199, len(levels)), levels)
    return np.append(1.0, (values * np.random.default_rng(8).normal(1, 0.1, 200))[1:])


def changed(values: np.ndarray, at: dict[int, float]) -> np.ndarray:
    found = values.copy()
    for place, more in at.items():
        found[place] += more
    return found


def rising(factor: float) -> np.ndarray:
    """Falls to 1 in the first half, then rises to `factor`."""
    down = losses(100, noise=0.01)
    return np.concatenate([down, np.linspace(1.0, factor, 80), np.full(20, factor)])


def routed(
    *,
    unused: list[float],
    busiest: list[float],
    tokens: float = 80.0,
    experts: dict[str, int] | None = {"layers": 4, "per_layer": 16, "per_token": 2},  # noqa: B006 - not changed
) -> Run:
    """A mixture of experts, by its records of `tokens` each."""
    steps = [10 * (place + 1) for place in range(len(unused))]
    seen = [tokens * (place + 1) for place in range(len(unused))]
    series = {"experts_unused": unused, "expert_load_max": busiest, "tokens_seen": seen}
    return run(series={name: (steps, values) for name, values in series.items()}, record={"experts": experts})


CLIPPED = {"clipped": ([100, 200], [1.0, 1.0])}
HOST_BOUND = {rank: {"wait": 0.048} for rank in range(2)}
IDLE = {rank: {"utilization": 0.7} for rank in range(2)}
ROWS = {"rows_read": 1000, "rows_kept": 900}
SEARCH = {"attempts": [{"per_device": 16, "tokens_per_second": 1000.0, "fits": True, "peak_bytes": 1}]}
SLOW_TOKENS = {"tokens_per_gpu": ([50, 100, 200], [690.0] * 3)}


def answered(before: int, after: int, count: int = 16) -> dict[str, Any]:
    """Of run.json: the number of broken answers."""
    return {"broken_answers_before": before / count, "broken_answers_after": after / count, "answers_scored": count}


def memory_use(share: float) -> dict[str, tuple[list[int], list[float]]]:
    """Of the fullest GPU, 0 to 1."""
    return {"fullest": ([50, 100, 200], [share / 2, share, share / 2])}


def padded(share: float) -> dict[str, tuple[list[int], list[float]]]:
    return {"padding": ([50, 100, 200], [share] * 3)}


FIRING: dict[str, list[Callable[[], Run]]] = {
    "data-wait": [
        lambda: run(phases={"data_wait": 0.112}),
        lambda: run(world=1, phases={"data_wait": 0.5}),
        lambda: run(world=8, phases={"data_wait": 0.3}, jitter=0.01),
        lambda: run(count=2, phases={"data_wait": 0.3}),
    ],
    "straggler": [
        lambda: run(slow={1: {"forward": 0.105}}),
        lambda: run(slow={0: {"data_wait": 0.12}}),
        lambda: run(world=8, slow={5: {"backward": 0.2}}, jitter=0.02),
        lambda: run(world=4, slow={1: {"forward": 0.3}, 2: {"forward": 0.3}}),
        lambda: run(gpu=False, slow={1: {"forward": 0.32}}),
        lambda: run(world=4, slow={3: {"optimizer": 3.0}}),
        lambda: run(phases={"communication": 5.0}, slow={1: {"forward": 0.2}}),
    ],
    "communication": [
        lambda: run(phases={"communication": 0.12}),
        lambda: run(phases={"communication": 0.7}),
        lambda: run(world=8, phases={"communication": 0.4}, jitter=0.02),
        lambda: run(gpu=False, phases={"communication": 0.12}),
        lambda: run(gpu=False, phases={"communication": 0.08}, jitter=0.3),
        lambda: run(count=2, phases={"communication": 0.3}),
    ],
    "padding": [lambda: run(series=padded(0.201)), lambda: run(series=padded(0.7))],
    "host-bound": [
        *(lambda world=world: run(world=world, by_rank=HOST_BOUND, gpu_of=IDLE) for world in (1, 2)),
        lambda: run(by_rank={r: {"wait": 0.12} for r in (0, 1)}, phases={"communication": 0.09}, gpu_of=IDLE),
    ],
    "small-batch": [
        lambda: run(record={"micro_batch_search": SEARCH}, series=SLOW_TOKENS | memory_use(0.49))
    ],
    "memory-near-limit": [
        lambda: run(series=memory_use(0.925)),
        lambda: run(series={"allocator_retries": ([100], [1.0])}),
    ],
    "throttling": [
        lambda: run(gpu_of={1: {"throttled": 0.11, "reasons": ["power cap"]}}),
        lambda: run(world=4, gpu_of={2: {"sm_clock_mhz": 1600.0}}),
        lambda: run(world=1, gpu_of={0: {"throttled": 1.0, "reasons": ["thermal"]}}),
    ],
    "evaluation-share": [
        lambda: run(record={"evaluation_seconds": 43.0}, series=evaluation(1.5, 1.4)),
        lambda: run(record={"training_seconds": None}, evaluation_seconds=2.6, series=evaluation(1.5, 1.4, 1.3)),
    ],
    "not-finite": [
        lambda: run(loss=changed(losses(), {150: math.nan})),
        lambda: run(loss=changed(losses(), {0: math.inf})),
        lambda: run(series={"gradient_norm": ([5, 6], [0.5, math.inf])}),
    ],
    "diverging": [lambda: run(loss=rising(1.25)), lambda: run(loss=rising(9.0)),
                  lambda: run(loss=np.concatenate([np.full(5, 2.0), np.linspace(2, 6, 35)])),
                  lambda: run(loss=np.append(losses(100, noise=0.01), np.linspace(1, 1.15, 100)), series=CLIPPED),
                  lambda: run(loss=noisy(30, 20, 6, 5)),  # ruined by its first step: no later loss is as low
                  lambda: run(loss=noisy(30, 20, 6, 5), series=trained(1.0, 5.0)),
                  lambda: run(loss=np.full(2, 3.0), series=trained(1.0, 1.03)),
                  lambda: run(loss=np.full(40, 3.0), series=evaluation(1.5, 1.0, 1.21))],
    "spikes": [
        lambda: run(loss=changed(losses(), {90: 0.4, 140: 0.4})),
        lambda: run(loss=changed(losses(), {90: 0.5, 140: 0.5}), series=CLIPPED),
        lambda: run(loss=changed(losses(), {place: 3.0 for place in range(40, 200, 10)})),
    ],
    "frozen": [
        lambda: run(series={"gradient_norm": ([1, 2, 3], [0.0, 0.95e-8, 0.95e-8])}),
        lambda: run(loss=np.random.default_rng(3).normal(6, 0.015, 200)),
        lambda: run(loss=np.random.default_rng(3).normal(6, 0.5, 40), series=evaluation(5.9, 5.9, 5.9)),
        lambda: run(loss=np.random.default_rng(3).normal(6, 0.5, 40), series=trained(6.0, 5.98)),  # rate too low
    ],
    "answers": [lambda: run(record=answered(4, 8)), lambda: run(record=answered(0, 2, 3))],
    "overfitting": [
        lambda: run(series=evaluation(1.5, 1.0, 1.021, 1.03)),
        lambda: run(series=evaluation(1, 2, 3)),
        lambda: run(series=evaluation(1.5, 1.0, 1.21)),
        lambda: run(series=trained(1.0, 1.021)),
    ],
    "leak": [lambda: run(record={"ledger": {"eval": {"rows_read": 50, "leaked": {"rows": 1, "first": None}}}})],
    "rows-lost": [
        lambda: run(record={"ledger": {"train": ROWS | {"dropped": {"no_label": 51}}}}),
        lambda: run(record={"ledger": {"train": ROWS | {"truncated": 101}}}),
        lambda: run(record={"ledger": {"eval": ROWS | {"truncated": 900}}}),
    ],
    "updates-lost": [lambda: run(series={"weights_unchanged": ([10, 20, 30], [0.1, 0.21, 0.9])})],
    "collapsed-routing": [
        lambda: routed(unused=[0.0, 0.0, 0.1, 0.5, 0.5, 0.6], busiest=[2.0] * 6),
        lambda: routed(unused=[0.0] * 6, busiest=[2.0, 2.0, 3.0, 7.3, 7.3, 7.3]),
    ],
}  # fmt: skip

SILENT: dict[str, list[Callable[[], Run]]] = {
    "data-wait": [
        lambda: run(phases={"data_wait": 0.105}),
        lambda: run(world=1, gpu=False),
        lambda: run(count=2, phases={"data_wait": 0.2}),  # two records prove little
    ],
    "straggler": [
        lambda: run(slow={1: {"forward": 0.09}}),
        lambda: run(gpu=False, slow={1: {"forward": 0.27}}),
        lambda: run(world=8, jitter=0.2),
        lambda: run(world=2, jitter=0.3),
        lambda: run(world=1, slow={0: {"forward": 5.0}}),
        lambda: run(gpu=False, slow={1: {"forward": 0.8}}, count=2),  # two records prove little
        lambda: run(phases={"communication": 5.0}, slow={1: {"forward": 0.16}}),  # little of the step
    ],
    "communication": [
        lambda: run(phases={"communication": 0.1}),
        lambda: run(world=1, phases={"communication": 0.9}),
        lambda: run(slow={1: {"forward": 2.0}}),  # waiting for a straggler
        lambda: run(gpu=False, phases={"communication": 0.05}, jitter=0.3),  # late by turns
        lambda: run(count=2, phases={"communication": 0.2}),  # two records prove little
    ],
    "padding": [lambda: run(series=padded(0.199)), lambda: run(series={"padding": ([], [])})],
    "host-bound": [
        lambda: run(by_rank={r: {"wait": 0.08} for r in (0, 1)}, gpu_of=IDLE),
        lambda: run(by_rank=HOST_BOUND, gpu_of={r: {"utilization": 0.84} for r in (0, 1)}),
        lambda: run(by_rank=HOST_BOUND, gpu_of=IDLE, phases={"data_wait": 0.4}),
        lambda: run(by_rank=HOST_BOUND, gpu_of=IDLE, phases={"communication": 0.4}),
        lambda: run(by_rank=HOST_BOUND, gpu_of={r: {"utilization": None} for r in (0, 1)}),
        lambda: run(gpu=False),
    ],
    "small-batch": [
        lambda: run(record={"micro_batch_search": SEARCH}, series=SLOW_TOKENS | memory_use(0.51)),
        lambda: run(series=SLOW_TOKENS | memory_use(0.2)),
        lambda: run(record={"micro_batch_search": SEARCH},
                    series={"tokens_per_gpu": ([50, 100], [710.0] * 2)} | memory_use(0.2)),
    ],
    "memory-near-limit": [lambda: run(series=memory_use(0.91))],
    "throttling": [
        lambda: run(gpu_of={1: {"throttled": 0.09}}),
        lambda: run(gpu_of={1: {"sm_clock_mhz": 1640.0}}),
        lambda: run(world=1, gpu_of={0: {"sm_clock_mhz": 500.0}}),
        lambda: run(gpu=False),
    ],
    "evaluation-share": [
        lambda: run(record={"evaluation_seconds": 39.0}, series=evaluation(1.5, 1.4, 1.3)),
        lambda: run(record={"evaluation_seconds": 90.0}, series=evaluation(1.5)),  # one evaluation cannot be rarer
        lambda: run(record={"evaluation_seconds": 8.9, "training_seconds": 20.0}, series=evaluation(1.5, 1.4, 1.3)),
        lambda: resumed(config={"training": {"eval_steps": 80, "max_steps": 80}}),  # nor one at the end
    ],
    "not-finite": [lambda: run(loss=changed(losses(), {150: 1e30}))],
    "diverging": [
        lambda: run(loss=rising(1.18)),
        lambda: run(loss=losses(end=0.01, noise=0.003)),  # a floor of nearly zero
        lambda: run(loss=np.random.default_rng(4).normal(1, 0.3, 200).clip(0.1)),
        lambda: run(series=CLIPPED),  # without harm
        lambda: run(loss=np.concatenate([losses(100, noise=0.01), np.linspace(1, 1.15, 100)]),
                    series={"clipped": ([100, 200], [0.88, 0.88])}),
        lambda: run(loss=np.append(0.4, np.random.default_rng(4).normal(1, 0.3, 199).clip(0.1))),  # an easy first batch
        lambda: run(loss=np.full(40, 3.0), series=trained(1.0, 1.019)),
        lambda: run(loss=np.full(40, 0.01), series=trained(0.01, 0.0199)),  # too small to matter
        lambda: run(loss=np.full(40, 3.0), series=evaluation(1.5, 1.0, 1.19)),
    ],
    "spikes": [
        lambda: run(loss=changed(losses(), {90: 0.6})),  # a single one
        lambda: run(loss=changed(losses(), {90: 0.1, 140: 0.1})),
        lambda: run(loss=losses(noise=0.2)),
        lambda: run(loss=np.exp(-np.arange(200) / 20) * 6 + np.random.default_rng(5).exponential(0.02, 200)),
    ],
    "frozen": [
        lambda: run(series={"gradient_norm": ([1, 2, 3], [0.0, 1.05e-8, 1.05e-8])}),
        lambda: run(loss=np.random.default_rng(3).normal(6, 0.9, 200)),  # too noisy to tell
        lambda: run(loss=np.random.default_rng(3).normal(6, 0.015, 90)),  # too short
        lambda: run(loss=np.random.default_rng(3).normal(6, 0.015, 200), series=trained(6.0, 5.96)),
        lambda: run(loss=np.random.default_rng(3).normal(6, 0.015, 14), series=trained(6.0, 5.99)),  # too short
        lambda: run(series=trained(6.0, 5.99)),  # the training loss falls
        lambda: run(loss=np.full(40, 0.01), series=trained(0.01, 0.01001)),  # nothing left to learn
    ],
    "answers": [
        lambda: run(record=answered(0, 7)),
        lambda: run(record=answered(5, 8)),  # hardly more than of the base model
        lambda: run(record=answered(0, 2, 2)),  # too few
        lambda: run(record=answered(1, 2, 3)),  # one answer
        lambda: run(loss=[5.8] * 5, count=0, record=answered(0, 2, 3)),  # after five steps
    ],
    "overfitting": [
        lambda: run(series=evaluation(1.5, 1.0, 1.019, 1.019)),
        lambda: run(series=evaluation(1.5, 1.0, 1.5, 1.01)),
        lambda: run(series=evaluation(1.5, 1.0, 1.19)),
        lambda: run(loss=rising(9.0), series=evaluation(1.5, 1.0, 1.5, 2.0)),
    ],
    "leak": [
        lambda: run(record={"ledger": {"eval": {"rows_read": 50, "leaked": {"rows": 0, "first": None}}}}),
        lambda: run(record={"ledger": {"eval": {"rows_read": 50}}}),
    ],
    "rows-lost": [
        lambda: run(record={"ledger": {"train": ROWS | {"dropped": {"no_label": 30, "empty": 19}}}}),
        lambda: run(record={"ledger": {"train": ROWS | {"truncated": 99}}}),
    ],
    "updates-lost": [
        lambda: run(series={"weights_unchanged": ([10, 20, 30], [0.1, 0.19, 0.9])}),
        lambda: run(series={"weights_unchanged": ([10, 20], [0.9, 0.9])}),  # two records prove little
        lambda: run(series={"weights_unchanged": ([10, 20, 30, *range(190, 201)], [0.1] * 3 + [0.9] * 11)}),  # decayed
        lambda: run(
            series={"weights_unchanged": ([10, 20, 30], [0.9] * 3)}, record={"master_weights": {"kind": "stochastic"}}
        ),
    ],
    "collapsed-routing": [
        lambda: routed(unused=[0.5, 0.5, 0.5, 0.49, 0.49, 0.6], busiest=[7.9, 7.9, 7.9, 7.1, 7.1, 7.1]),
        lambda: routed(unused=[0.9] * 6, busiest=[2.0] * 6, tokens=79),  # of which an expert would have 9.9
        lambda: routed(unused=[0.9] * 2, busiest=[8.0] * 2),  # two records prove little
        lambda: routed(unused=[0.9] * 6, busiest=[8.0] * 6, experts=None),
    ],
}  # fmt: skip


def cases(table: dict[str, list[Callable[[], Run]]]) -> list[Any]:
    return [
        pytest.param(name, make, id=f"{name}-{place}") for name, of in table.items() for place, make in enumerate(of)
    ]


@pytest.mark.parametrize(("rule", "make"), cases(FIRING))
def test_a_rule_fires_beyond_its_threshold_and_no_other_does(rule: str, make: Callable[[], Run]) -> None:
    assert fired(make()) == [rule]


@pytest.mark.parametrize(("rule", "make"), cases(SILENT))
def test_a_rule_is_silent_below_its_threshold(rule: str, make: Callable[[], Run]) -> None:
    assert rule not in fired(make())


@pytest.mark.parametrize("world", [1, 2, 8])
@pytest.mark.parametrize("gpu", [True, False])
def test_healthy_runs_have_no_findings(world: int, gpu: bool) -> None:
    assert fired(run(world=world, gpu=gpu, jitter=0.03)) == []


def test_every_rule_is_tried_and_names_the_source_of_its_threshold() -> None:
    assert FIRING.keys() == SILENT.keys()
    assert RULES.keys() == FIRING.keys() | {"efficiency", "hang"}
    for name, rule in RULES.items():
        assert inspect.getdoc(rule), name


def test_findings_state_numbers_advice_and_gain() -> None:
    for makers in FIRING.values():
        for make in makers:
            for found in findings(make()):
                for text in (found.evidence, found.gain, *found.figures):
                    assert any(sign.isdigit() for sign in text), (found.rule, text)
                assert found.advice and found.headline and len(found.figures) == 2
                assert math.isfinite(found.lost)
                assert "   #" not in found.advice and not found.gain.endswith("%"), (found.advice, found.gain)
                assert "train_batch_size: " not in found.advice or "(now 4)" in found.advice


# --- closer to single thresholds -------------------------------------------------------------------------------------


def piecewise(*points: tuple[int, float], noise: float = 1e-4) -> np.ndarray:
    """200 losses through (step, loss)."""
    steps, values = zip(*points, strict=True)
    return np.interp(np.arange(200), steps, values) + np.random.default_rng(6).normal(0, noise, 200)


def slow_in(healthy: int) -> Run:
    """A rank that is slow in all of its 19 records after the warm-up but so many."""
    (starts, slow), (_, usual) = synthetic.lines(slow={1: {"forward": 0.5}}), synthetic.lines()
    return run(ranks=(starts, slow[:-healthy] + usual[-healthy:]))


CLOSE: dict[str, tuple[str, Callable[[], Run], Callable[[], Run]]] = {
    "height of spikes": (
        "spikes",
        lambda: run(loss=changed(piecewise((0, 1.4), (30, 1.0), (199, 1.0)), {80: 0.105, 140: 0.105})),
        lambda: run(loss=changed(piecewise((0, 1.4), (30, 1.0), (199, 1.0)), {80: 0.095, 140: 0.095})),
    ),
    "spikes on a slope": (
        "spikes",
        lambda: run(loss=changed(piecewise((0, 11.0), (199, 1.0)), {125: 0.86, 165: 0.86})),
        lambda: run(loss=changed(piecewise((0, 11.0), (199, 1.0)), {125: 0.74, 165: 0.74})),
    ),
    "rise by the fall before": (
        "diverging",
        lambda: run(loss=piecewise((0, 100.0), (10, 1.0), (150, 1.0), (170, 3.2), (199, 3.2))),
        lambda: run(loss=piecewise((0, 100.0), (10, 1.0), (150, 1.0), (170, 2.7), (199, 2.7))),
    ),
    "consistent": ("straggler", lambda: slow_in(3), lambda: slow_in(5)),
}


@pytest.mark.parametrize("name", CLOSE)
def test_close_to_a_threshold(name: str) -> None:
    rule, beyond, short = CLOSE[name]
    assert (fired(beyond()), rule in fired(short())) == ([rule], False)


@pytest.mark.parametrize(("seconds", "expected"), [(0.16, "its loader"), (0.14, "its computation")])
def test_a_cause_explains_half_of_the_delay(seconds: float, expected: str) -> None:
    found = straggler.check(run(slow={1: {"data_wait": seconds, "forward": 0.3 - seconds}}))
    assert found is not None and expected in found.evidence


# --- what a finding says ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "more"),
    [
        ("its loader", {"slow": {1: {"data_wait": 0.3}}}),
        ("its rows: 1.30 times the others' tokens",
         {"slow": {1: {"forward": 0.3}}, "by_rank": {1: {"tokens": 13_000}}}),
        ("its rows: 1.40 times the others' attention",
         {"slow": {1: {"forward": 0.3}}, "by_rank": {1: {"squared_lengths": 1_400_000}}}),
        ("its clocks: 1400 MHz, the others 1900 MHz",
         {"slow": {1: {"forward": 0.3}}, "gpu_of": {1: {"sm_clock_mhz": 1400}}}),
        ("Its SM clock is 16 % lower (1600 MHz, the others 1900 MHz)",
         {"slow": {1: {"forward": 0.3}}, "gpu_of": {1: {"sm_clock_mhz": 1600}}}),
        ("its rows, loader and clocks are like the others'",
         {"slow": {1: {"forward": 0.3}}, "gpu_of": {1: {"sm_clock_mhz": 1850}}}),
        ("its clocks: throttled in 90 % of samples (thermal)",
         {"slow": {1: {"forward": 0.3}}, "gpu_of": {1: {"throttled": 0.9, "reasons": ["thermal"]}}}),
        ("another process", {"slow": {1: {"forward": 0.3}}, "gpu_of": {1: {"other_processes": 1}}}),
        ("its computation, mostly in its backward phase", {"slow": {1: {"backward": 0.3}}}),
    ],
)  # fmt: skip
def test_a_straggler_is_named_with_its_cause(expected: str, more: dict[str, Any]) -> None:
    found = straggler.check(run(**more))
    assert found is not None
    assert "rank 1 (host host0, GPU 1, NVIDIA H200)" in found.headline
    assert expected in found.evidence
    assert found.lost == pytest.approx(0.3 / 1.3, rel=0.02)
    assert "1.3 s -> about 1 s" in found.gain


def test_lost_updates_are_not_to_be_cured_by_what_ran() -> None:
    for kind, advice in (("none", "training.master_weights: auto"), ("float32", "a higher training.learning_rate")):
        one = run(series={"weights_unchanged": ([10, 20, 30], [0.3] * 3)}, record={"master_weights": {"kind": kind}})
        found = learning.updates_lost(one)
        assert found is not None and found.advice.startswith(advice) and "learning rate up to 0.001." in found.evidence


def test_communication_says_when_one_gpu_is_cheaper() -> None:
    texts = [ranks.communication(run(phases={"communication": seconds})) for seconds in (0.2, 0.5)]
    assert ["One GPU is likely cheaper" in found.evidence for found in texts if found] == [False, True]


def sharing(ranks: int, per_device: int = 1, **training: Any) -> dict[str, Any]:
    """Of run.json: ranks that share each row, with activations in host memory and MLPs in slices."""
    kept = {"learning_rate": 1e-3, "context_parallel": ranks, "gradient_checkpointing": "offload"} | training
    config = {"training": kept, "data": {"max_length": 1024, "packing": False}, "model": {"tiled_mlp": True}}
    batch = {"per_device": per_device, "accumulation": 2, "global_batch_size": 8}
    return {"config": config, "batch": batch, "backend": "transformers"}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (sharing(1), "training.context_parallel: 2 on 4 GPUs, or a lower data.max_length"),
        (sharing(2), "training.context_parallel: 4 on 4 GPUs, or a lower data.max_length"),
        (sharing(4), "a lower data.max_length"),
        (sharing(1) | {"backend": "unsloth"}, "model.tiled_mlp"),
        (sharing(2, 2), "training.per_device_train_batch_size: 1"),
    ],
)
def test_a_row_that_fills_the_gpus_is_to_be_shared_by_more(record: dict[str, Any], expected: str) -> None:
    if record["backend"] == "unsloth":
        record = record | {"config": record["config"] | {"model": {}}}
    found = memory.near_limit(run(world=4, series=memory_use(0.95), record=record))
    assert found is not None and found.advice.startswith(expected)


def test_the_exchange_of_shared_rows_is_no_straggler_and_not_to_be_cured_by_a_larger_batch() -> None:
    record = sharing(2)
    found = ranks.communication(run(world=4, phases={"communication": 0.3}, record=record))
    assert found is not None and "Shared rows and gradients travel" in found.evidence
    assert found.advice.startswith("a smaller training.context_parallel than 2") and "global_batch" not in found.advice
    assert fired(run(world=4, phases={"communication": 0.3}, record=record)) == ["communication"]
    # The rank that shares its rows waits for the slow one in each layer, the others at the end: one cause.
    slow = run(world=4, phases={"communication": 0.3}, slow={1: {"forward": 0.5}}, record=record)
    assert fired(slow) == ["straggler"]
    one, two = of_speed("one", 1, 100.0), of_speed("two", 2, 130.0)
    two.record["config"] = one.record["config"] | {"training": record["config"]["training"]}
    (worth,) = findings(two, [one])
    assert worth.rule == "efficiency" and worth.advice.startswith("set training.context_parallel: 1")


def of_speed(name: str, world: int, rate: float) -> Run:
    return replace(run(world=world, series={"rows_per_second": ([50, 100, 200], [rate] * 3)}), name=name)


@pytest.mark.parametrize(("rate", "expected"), [(139.0, ["efficiency"]), (141.0, []), (80.0, ["efficiency"])])
def test_efficiency_is_judged_against_the_one_gpu_run(rate: float, expected: list[str]) -> None:
    one, two = of_speed("one", 1, 100.0), of_speed("two", 2, rate)
    assert fired(two, one) == expected
    assert fired(two) == fired(one, two) == []


def test_efficiency_ignores_another_model() -> None:
    other = of_speed("one", 1, 100.0)
    other.record["config"]["model"] = {"model_name_or_path": "another"}
    assert fired(of_speed("two", 2, 90.0), other) == []


MISSING = [{"rank": 1, "step": 7, "phase": "data", "seconds": 140.0, "answered": False}]
WAITING = {"rank": 0, "step": 7, "phase": "backward", "seconds": 130.0, "collective": "all_reduce", "waited": 130.0}


@pytest.mark.parametrize(
    ("hang", "headline", "where"),
    [
        ({"missing": MISSING, "collective": "all_reduce"}, "Rank 1 did not answer", "step 7, in data for 140 s"),
        ({"missing": [MISSING[0] | {"answered": True}]}, "Rank 1 kept the others waiting", "step 7, in data"),
        ({"missing": [{"rank": rank} for rank in range(9)]}, "Ranks 0, 1, 2, 3 and 5 more did not answer", "step 8"),
        ({"missing": [], "collective": "barrier"}, "Rank 0 and all others waited for each other", "in backward"),
        ({"missing": []}, "Rank 0 was in one phase for long", "step 7, in backward for 130 s"),
    ],
)
def test_a_hang_report_is_a_finding_until_training_goes_on(hang: dict[str, Any], headline: str, where: str) -> None:
    hang = {"answered": [WAITING], "step": 8, "time": 250.0} | hang
    stuck = replace(run(record={"status": "failed"}), hang=hang)
    [only] = findings(stuck)
    assert (only.rule, only.headline) == ("hang", headline)
    assert where in only.evidence
    assert fired(replace(stuck, hang=hang | {"time": 150.0})) == []  # the last record is of 200 s
    assert [found.level for found in findings(replace(run(), hang=hang))] == ["note"]


def halves(one: Run) -> list[tuple[str, str, str]]:
    return [(half.level, str(half), half.confidence) for half in verdict(one, findings(one))]


def test_the_verdict_has_two_halves_with_two_numbers_and_a_confidence() -> None:
    good, slow = halves(run(slow={1: {"forward": 0.5}}, series=trained(3.0, 1.0)))
    assert good == ("good", "Learning: held-out loss 3 -> 1.", "high")
    assert slow[1].startswith("Speed: rank 1 (host host0, GPU 1, NVIDIA H200) holds the others up: own work 1.48 s per")
    assert "33 % of each step lost" in slow[1] and slow[::2] == ("warning", "high")
    ruined, fast = halves(run(loss=noisy(30, 20, 6, 5), series=trained(1.0, 5.0) | CLIPPED))
    assert ruined == (
        "warning",
        "Learning: The run made the model worse: held-out loss 1 before training, 5 after training.",
        "high",
    )
    assert fast == ("good", "Speed: nothing limits it: exposed communication 2.0 %, data wait 1.0 %.", "high")


def test_a_gpu_that_hardly_computes_is_not_called_fast() -> None:
    """0.07 without CUDA graphs, 0.2 with, 0.13 with on four GPUs: no rule has more to say of SmolLM2's kernels."""
    unused = {"cuda_graphs": {"used": False, "reason": "rows are not packed"}}
    slow = run(series=trained(3.0, 1.0) | {"mfu": ([10, 20, 30], [0.07] * 3)}, record=unused)
    level, text, _ = halves(slow)[1]
    assert level == "unknown" and text.startswith("Speed: MFU is 7.0 %, and no rule says why")
    assert text.endswith("(CUDA graphs: rows are not packed).")
    used = {"cuda_graphs": {"used": True, "reason": "faster, with the same results"}}
    waits = {"mfu": ([10, 20, 30], [0.13] * 3), "lost_to_slowest": ([10, 20, 30], [0.1] * 3)}
    assert halves(run(series=trained(3.0, 1.0) | waits, record=used))[1][1] == (
        "Speed: MFU is 13 %: kernels are short. Give each pass more rows, or use fewer GPUs. Waiting for "
        "whichever rank is slowest costs 10 % of the time."
    )
    fast = run(series=trained(3.0, 1.0) | {"mfu": ([10, 20, 30], [0.2] * 3)})
    assert halves(fast)[1][1].startswith("Speed: nothing limits it: MFU 20 %")


def test_other_processes_on_the_gpus_are_named() -> None:
    alone, shared = (synthetic.lines(gpu_of={1: {"other_processes": count}}) for count in (0, 2))
    said = "Other processes used its GPUs in 100 % of the samples."
    assert halves(run(ranks=shared))[1][1].endswith(said) and said not in halves(run(ranks=alone))[1][1]


@pytest.mark.parametrize(
    ("more", "level", "expected"),
    [
        ({}, "unknown", "training loss 2.371 -> 1.003; no held-out rows to check it on."),
        ({"loss": [3.0] * 40}, "unknown", "training loss 3 -> 3, which is within its noise; no held-out rows."),
        ({"loss": [3.0, 2.0]}, "unknown",
         "2 logged losses, too few to judge (at least 15), and no held-out rows."),
        ({"loss": [3.0, 2.9], "series": trained(3.0, 2.96)}, "unknown",
         "held-out loss 3 -> 2.96; 2 logged losses, too few to judge (at least 15)."),
        ({"loss": [3.0, 2.9], "series": trained(3.0, 2.9)}, "good", "held-out loss 3 -> 2.9."),
        ({"loss": [5.8] * 5, "series": {"eval_loss": ([5], [5.8144])},  # resumed, with held-out rows added
          "record": {"eval_loss_before": 5.8182, "eval_loss_after": 5.8144}}, "unknown",
         "held-out loss 5.818 -> 5.814; 5 logged losses, too few to judge (at least 15)."),
        ({"loss": [1.4], "series": {"eval_loss": ([0], [1.513])},  # most of its events are lost
          "record": {"steps": 16, "eval_loss_before": 1.513, "eval_loss_after": 9.002}}, "warning",
         "The run made the model worse: held-out loss 1.513 before training, 9.002 after training."),
        ({"series": evaluation(2.0)}, "unknown",
         "training loss 2.371 -> 1.003; no second held-out loss to check it on."),
        ({"series": trained(3.0, 3.01)}, "unknown", "held-out loss 3 -> 3.01; it did not fall."),
        ({"record": {"status": "failed", "error": "Out of memory."}}, "warning",
         "the run failed: Out of memory. No rule found a cause."),
    ],
)  # fmt: skip
def test_what_cannot_be_judged_is_not_green(more: dict[str, Any], level: str, expected: str) -> None:
    assert halves(run(**more))[0][:2] == (level, f"Learning: {expected}")


def test_the_speed_of_a_few_steps_is_not_judged() -> None:
    starts, (line,) = synthetic.lines(count=1)
    few = run(loss=[3.0] * 4, ranks=(starts, [line | {"step": 4, "steps": 4}]), record={"steps": 4})
    assert halves(few)[1] == ("unknown", "Speed: 4 steps, too few to judge (at least 5).", "low")


def test_of_several_held_out_sets_the_one_that_rose_is_named() -> None:
    one = run()
    tag = tags.tag("eval_loss")
    for name, after in (("own", 1.0), ("general", 3.3)):
        one.scalars[f"{tag} ({name})"] = events.of([0, 200], [3.0, after])
    [found] = findings(one)
    assert found.rule == "overfitting" and "The held-out loss (general) was lowest at step 0, 3" in found.evidence


def test_what_spoils_the_result_comes_before_what_costs_time() -> None:
    one = run(phases={"data_wait": 0.9}, loss=rising(5.0))
    assert [found.rule for found in findings(one)] == ["diverging", "data-wait"]


def test_shares_that_the_fixtures_calibrate_are_what_the_rules_compare() -> None:
    assert straggler.value(run(slow={1: {"forward": 0.49}})) == pytest.approx(1.5)
    assert speed.host_lead(run()) == pytest.approx(0.5)
    assert learning.clipped_share(run(series=CLIPPED)) == 1.0


def test_divergence_of_a_running_run() -> None:
    """What training.stop_on_divergence asks for at each record."""
    falling = [5.0 * 0.97**step + 0.5 for step in range(120)]
    assert divergence(falling, []) is None and divergence(falling[:5], []) is None
    rising = [*falling, *(0.7 + 0.1 * step for step in range(60))]
    assert "the lowest was 0." in str(divergence(rising, []))
    # Half of a ruined run: the loss falls again from where its first step brought it.
    assert divergence(list(noisy(30, 20, 6, 5))[:40], []) == "loss 21.73, the lowest was 1 at step 1"
    evaluations = [{"step": step, "loss": loss} for step, loss in ((0, 2.0), (20, 2.1))]
    assert divergence([2.0] * 20, evaluations) == "held-out loss 2.1, 2 before training"
    assert divergence([2.0] * 14, evaluations) is None and divergence(falling, evaluations) is None
    assert divergence([2.0] * 20, [one | {"set": "general"} for one in evaluations]) is None


def resumed(**record: Any) -> Run:
    """80 steps, of which the last 40 are of this session: eight evaluations in each."""
    every_5 = {"eval_loss": (list(range(0, 81, 5)), [1.0 - step / 1000 for step in range(0, 81, 5)])}
    training = {"learning_rate": 1e-3, "eval_steps": 5, "max_steps": 80}
    content = {"evaluation_seconds": 30.0, "saving_seconds": 2.0, "training_seconds": 100.0, "steps": 80}
    return run(loss=losses(80), count=8, series=every_5, record=content | {"config": {"training": training}} | record)


def test_evaluating_more_rarely_saves_what_the_finding_says() -> None:
    """30 of 100 s are evaluations every 5 steps. Every 20 steps they take 7.5 s."""
    found = speed.evaluation_share(resumed())
    assert found is not None and found.advice.startswith("training.eval_steps: 20,")
    assert found.gain == "every 20 steps instead of every 5: -22 % wall time"  # 22.5 of 100 s
    assert "in 16 pauses." in found.evidence and "resumed" not in found.evidence


def test_a_short_run_is_not_told_to_evaluate_after_its_end() -> None:
    few = {"learning_rate": 1e-3, "eval_steps": 2, "max_steps": 6}
    found = speed.evaluation_share(replace_steps(resumed(config={"training": few}), 6))
    assert found is not None and found.advice.startswith("training.eval_steps: 6,")
    assert found.gain == "every 6 steps instead of every 2: -20 % wall time"  # two of three evaluations


def replace_steps(one: Run, steps: int) -> Run:
    kept = {tag: series for tag, series in one.scalars.items() if "eval" in tag}
    return replace(one, record=one.record | {"steps": steps}, scalars=kept, ranks=None)


def test_figures_of_a_resumed_run_say_since_when() -> None:
    found = speed.evaluation_share(resumed(resumed_from="outputs/x/checkpoint-40"))
    assert found is not None and "in 8 pauses. Counted since step 40, where the run was resumed." in found.evidence
