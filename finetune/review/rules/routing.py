"""Whether a mixture of experts still uses its experts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from finetune.review.events import Series
from finetune.review.finding import Finding, number, percent
from finetune.review.rules.learning import lower_rate
from finetune.review.run import Run

UNUSED = 0.5  # of the experts of all layers, without a token; calibrated
ON_ONE = 0.9  # of the tokens choose the same expert in the mean layer: nine of ten, by definition
LAST_RECORDS = 3  # or the last tenth of the records, if that is more
FEWEST_TOKENS = 10.0  # of an expert in a record if all are used evenly: then chance leaves one of 20,000 without any
COEFFICIENT = 0.01  # Switch Transformers, arXiv 2101.03961, section 2.2: enough to balance the load, not to disturb


def unused(run: Run) -> float | None:
    """Share of the experts without a token in the median of the last records; None if it is not recorded or the records
    have too few tokens to say."""
    seen, most = run.series("tokens_seen").finite().values, _most(run)
    enough = len(seen) > 1 and most and float(np.median(np.diff(seen))) / most >= FEWEST_TOKENS  # in the median record
    return _at_the_end(run.series("experts_unused")) if enough else None


def share_on_one(run: Run) -> float | None:
    """Share of the tokens that choose a layer's busiest expert, mean over layers, in the median of the last records."""
    found, most = _at_the_end(run.series("expert_load_max")), _most(run)
    return None if found is None or most is None else found / most


def _at_the_end(series: Series) -> float | None:
    values = series.finite().values
    return float(np.median(values[-max(LAST_RECORDS, len(values) // 10) :])) if len(values) >= LAST_RECORDS else None


def _most(run: Run) -> float | None:
    """The load of an expert that all tokens choose, in units of even use."""
    experts, chosen = run.number("experts.per_layer"), run.number("experts.per_token")
    return experts / chosen if experts and chosen else None


def collapsed(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """In the last records, at least half of the experts of all layers get no token (calibrated), although each would
    have ten if they were used evenly; or nine of ten tokens choose the same expert in the mean layer (by definition).
    """
    idle, on_one = unused(run), share_on_one(run)
    if not ((idle is not None and idle >= UNUSED) or (on_one is not None and on_one >= ON_ONE)):
        return None
    idle, on_one = idle or 0.0, on_one or 0.0
    first = float(run.series("experts_unused").finite().values[0])
    coefficient = run.number("config.training.extra.router_aux_loss_coef")
    if coefficient is None:  # then the model's configuration has it
        coefficient = run.number("settings.model config.router_aux_loss_coef") or 0.0
    return Finding(
        rule="collapsed-routing",
        headline="Routing has collapsed: a few experts get all tokens",
        figures=(f"{percent(idle)} of the experts without a token", f"{percent(on_one)} of the tokens on one expert"),
        evidence=f"In the last records {percent(idle)} of the experts of all layers get no token (threshold "
        f"{percent(UNUSED)}; {percent(first)} in the first record), and {percent(on_one)} of the tokens choose "
        f"their layer's busiest expert (threshold {percent(ON_ONE)}, mean over layers).",
        advice=f"training.router_aux_loss_coef: {max(10 * coefficient, COEFFICIENT):g} (now {number(coefficient)}); "
        f"{lower_rate(run)}; with LoRA leave the router out of lora.target_modules and modules_to_save",
        gain=f"{percent(idle)} more of the experts in use, at the same step time"
        if idle >= UNUSED
        else f"{percent(on_one)} of the tokens spread over other experts, at the same step time",
        confidence="high" if idle >= 1.5 * UNUSED or on_one >= ON_ONE else "medium",
        charts=("experts_unused", "expert_load_max"),
    )
