"""Pure sums and rates of training. Counts are summed over ranks first and divided last."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """What the floating-point operations of a step depend on."""

    parameters: int
    active_parameters: int  # that one token uses: all but the experts that it is not routed to
    matmul_parameters: int  # of the active ones, those that multiply it: all but embeddings
    trainable_parameters: int
    active_trainable_parameters: int
    layers: int
    hidden: int
    attention: int  # width of the queries of all heads of a layer, the mean where some layers have no attention

    @property
    def text(self) -> str:
        """`30.5 B parameters, 3.35 B active per token`."""
        return parameters_text(self.parameters, self.active_parameters)


def parameters_text(total: int, active: int | None = None) -> str:
    """Parameters of a model, and of a mixture of experts those that a token uses."""
    routed = f", {_abbreviated(active)} active per token" if active is not None and active < total else ""
    return f"{_abbreviated(total)} parameters{routed}"


def _abbreviated(count: int) -> str:
    """`30.5 B`, `164 M`, `13.9 K`."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= 0.9995 * size:
            return f"{count / size:,.0f} {letter}" if count >= 100 * size else f"{count / size:.3g} {letter}"
    return str(count)


def training_flops(size: ModelSize, *, tokens: int, squared_lengths: int) -> float:
    """Floating-point operations of forward and backward, without recomputation: the "model FLOPs" of PaLM (arXiv
    2204.02311, appendix B), with frozen weights counted as frozen.

    Per token, each weight costs 2 forward, 2 for the gradient of its input, and 2 more for its own gradient where it is
    trained. Causal attention costs 2 * its width per layer and squared length forward, and twice that backward. Of
    routed experts and their adapters those count that the token is routed to, as in Megatron-LM's
    `num_floating_point_operations`.

    Args:
        tokens: real tokens, padding excluded.
        squared_lengths: sum over documents of length squared.
    """
    per_token = 4 * size.matmul_parameters + 2 * size.active_trainable_parameters
    return float(per_token) * tokens + 6.0 * size.layers * size.attention * squared_lengths


def mfu(flops: float, seconds: float, gpus: int, peak_tflops: float | None) -> float | None:
    """Model FLOPs utilization, 0 to 1: achieved over peak. None where the peak is not known."""
    if peak_tflops is None or seconds <= 0:
        return None
    return flops / seconds / (gpus * peak_tflops * 1e12)


def expert_loads(tokens: Sequence[np.ndarray]) -> np.ndarray:
    """The load of each expert of all layers: its tokens, by those that it had if all of its layer were used evenly.

    Args:
        tokens: of each expert, [experts] for each layer; at least one layer, each with a token.
    """
    return np.concatenate([one / one.mean() for one in tokens])


def expert_load_summary(tokens: Sequence[np.ndarray]) -> dict[str, float]:
    """What the tokens of each expert amount to, by the names of `runtime.tags`; empty without layers of experts."""
    if not tokens:
        return {}
    loads = [expert_loads([one]) for one in tokens]
    most, least = [float(one.max()) for one in loads], [float(one.min()) for one in loads]
    return {
        "expert_load_max": statistics.fmean(most),
        "expert_load_max_worst": max(most),
        "expert_load_min": statistics.fmean(least),
        "expert_load_min_worst": min(least),
        "experts_unused": float(np.mean(np.concatenate(loads) == 0)),
    }


def rate(count: float, seconds: float) -> float | None:
    """count per second; None where no time has passed."""
    return count / seconds if seconds > 0 else None


def median(values: Sequence[float]) -> float | None:
    """None for no values."""
    return statistics.median(values) if values else None


def exact_match(answers: Sequence[str], references: Sequence[str]) -> float:
    """The share (0 to 1) of answers that equal their reference, case and punctuation included, runs of white space
    counting as one space. Raises ValueError where the two differ in number or are empty."""
    if not references or len(answers) != len(references):
        raise ValueError(f"{len(answers)} answers and {len(references)} references; one answer for each is needed")
    pairs = zip(answers, references, strict=True)
    return sum(answer.split() == reference.split() for answer, reference in pairs) / len(references)
