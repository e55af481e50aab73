"""Whether the run learns, judged by its curves."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from finetune.review.events import Series
from finetune.review.finding import Finding, number, percent
from finetune.review.finding import steps as named
from finetune.review.rules import curve
from finetune.review.run import Run
from finetune.text import counted

FEWEST = 15  # losses, for a statement about their course
RISE = 1.2  # last tenth by the least running median; calibrated
RISE_NOISE = 2.0  # standard deviations of a single loss
RISE_ERRORS = 5.0  # standard errors of the two medians, which matter in short runs: the least is the least of many
RISE_OF_FALL = 0.02  # of the fall from the first losses to the least: a floor of nearly zero doubles by chance
SPIKE_Z = 7.0  # modified Z-score: 3.5 of the dual-GPU study, doubled because a run has thousands of points
SPIKE_TAIL = 3.0  # plus ln(n): the noise of small batches has an exponential tail, in which n losses reach ln(n)
SPIKE_HEIGHT = 0.10  # of the trend
SPIKE_OF_SLOPE = 0.75  # of what the trend changes by in the neighborhood: a loss that falls steeply is unsteady
SPIKE_OF_FALL = 0.02
SPIKES = 2
FROZEN_NORM = 1e-8
FROZEN_STEPS = 100
FROZEN_ERROR = 0.001  # of the loss: only if its noise would have shown a fall of 0.3 %
FROZEN_EVALUATION = 1e-5  # relative change of the evaluation loss, which has no sampling noise
CLIPPED = 0.90  # of the steps after warm-up; calibrated
CLIPPED_RISE = 1.05  # last tenth by the least running median; from RISE on, the run diverges
CLIPPED_STEPS = 50
CLIPPED_FAR = 10.0  # gradient norm by max_grad_norm: then clipping, not single rows, shapes the run
UNCHANGED = 0.20  # of the trained weights; calibrated, and the least that is worth a warning
OVERFIT = 1.02  # evaluation loss by its minimum; calibrated
OVERFIT_LAST = 2  # evaluations in a row


def losses(run: Run) -> Series:
    """The finite training losses."""
    return run.series("loss").finite()


def not_finite(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """A NaN or an infinity in the loss or the gradient norm, by definition."""
    bad: dict[str, list[int]] = {}
    for name in ("loss", "eval_loss", "gradient_norm"):
        series = run.series(name)
        steps = series.steps[~np.isfinite(series.values)]
        if len(steps):
            bad[name.replace("_", " ")] = [int(step) for step in steps]
    if not bad:
        return None
    first = min(steps[0] for steps in bad.values())
    total = run.steps or first
    where = "; ".join(f"{name}: {named(steps)}" for name, steps in bad.items())
    checkpoint = checkpoint_before(run, first - 1)
    from_there = f"; resume from {checkpoint}" if checkpoint else ""
    dtype = run.text("dtype") or "not recorded"
    half = "model.dtype: bfloat16; " if dtype == "float16" else ""
    return Finding(
        rule="not-finite",
        headline=f"Values are not finite from step {first} on",
        figures=(
            f"NaN or infinite: {counted(sum(map(len, bad.values())), 'value')}",
            f"the first at step {first} of {total}",
        ),
        evidence=f"NaN or infinity in {where}. dtype {dtype}, learning rate {_rate_at(run, first)}.",
        advice=f"{half}{lower_rate(run)}{from_there}",
        gain=f"{max(total - first + 1, 1)} of {total} steps that train",
        lost=max(total - first + 1, 1) / max(total, 1),
        charts=("loss", "gradient_norm"),
    )


@dataclass(frozen=True)
class Rise:
    """How far the loss has risen above its least level."""

    least: float
    least_step: int
    last: float
    noise: float  # standard deviation of a single loss
    error: float  # standard error of `last - least`
    fall: float  # from the first losses to the least

    def is_above(self, factor: float) -> bool:
        """Whether the last losses are above `factor` times the least, beyond their noise."""
        height = self.last - self.least
        floor = max(RISE_NOISE * self.noise, RISE_ERRORS * self.error, RISE_OF_FALL * self.fall)
        return self.last > factor * self.least and height >= floor


def rise(run: Run) -> Rise | None:
    """The rise of the loss, or None with too few losses."""
    series = losses(run)
    return rise_of(series.steps, series.values)


def divergence(values: Sequence[float]) -> str | None:
    """Whether a run with these losses of all its steps diverges by the rule below, as a sentence; for a run that is to
    stop itself."""
    kept = np.array([value for value in values if math.isfinite(value)])
    found = rise_of(np.arange(1, len(kept) + 1), kept)
    if found is None or not found.is_above(RISE):
        return None
    return f"loss {number(found.last)}, the lowest was {number(found.least)} at step {found.least_step}"


def rise_of(steps: np.ndarray, values: np.ndarray) -> Rise | None:
    """The rise of finite losses at these steps, or None with too few of them."""
    if len(values) < FEWEST:
        return None
    width = max(5, len(values) // 10)
    end = max(3, len(values) // 10)
    medians = curve.window_medians(values, width)
    place = int(medians.argmin())
    noise = curve.noise(values)
    return Rise(
        least=float(medians[place]),
        least_step=int(steps[min(place + width // 2, len(values) - 1)]),
        last=float(np.median(values[-end:])),
        noise=noise,
        error=noise * 1.2533 * math.sqrt(1 / width + 1 / end),
        fall=max(float(np.median(values[:3])) - float(medians[place]), 0.0),
    )


def diverging(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """The median loss of the last tenth is above 1.2 times the least running median, by at least twice the noise
    (1.4826 MAD) and 2 % of the fall before. Calibrated."""
    found = rise(run)
    if found is None or not found.is_above(RISE):
        return None
    height = found.last - found.least
    checkpoint = checkpoint_before(run, found.least_step)
    total = run.steps or found.least_step
    return Finding(
        rule="diverging",
        headline="The run diverges: its loss rises",
        figures=(f"loss {number(found.last)} at the end", f"{number(found.least)} at step {found.least_step}"),
        evidence=f"Median loss of the last tenth {number(found.last)}: {found.last / max(found.least, 1e-12):.2f} "
        f"times the lowest, {number(found.least)} at step {found.least_step} (threshold {RISE}); noise "
        f"{number(found.noise)}.",
        advice=f"{lower_rate(run)}; training.warmup_steps: {max(total // 20, 10)}"
        + (f"; the best checkpoint is {checkpoint}" if checkpoint else ""),
        gain=f"{number(height)} nats lower loss, and the {counted(total - found.least_step, 'step')} since",
        lost=(total - found.least_step) / max(total, 1),
        confidence="high" if height >= 4 * found.noise else "medium",
        charts=("loss", "gradient_norm", "learning_rate"),
    )


def spike_steps(run: Run) -> tuple[list[int], float]:
    """Steps whose loss stands out from its trend, and the largest modified Z-score."""
    series = losses(run)
    values = series.values
    if len(values) < FEWEST:
        return [], 0.0
    half = min(10, len(values) // 6)
    trend = curve.running_median(values, half)
    residuals = values - trend
    distances = np.abs(residuals)
    local = np.maximum(curve.running_median(distances, 25), float(np.median(distances)) / 2)
    fall = max(float(np.median(values[:3])) - float(np.min(trend)), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        scores = np.where(local > 0, 0.6745 * residuals / local, np.where(residuals > 0, np.inf, 0.0))
    floor = np.maximum(SPIKE_HEIGHT * np.abs(trend), SPIKE_OF_FALL * fall)
    padded = np.pad(trend, half, mode="edge")
    floor = np.maximum(floor, SPIKE_OF_SLOPE * np.abs(padded[2 * half :] - padded[: len(trend)]))
    floor = np.maximum(floor, (SPIKE_TAIL + math.log(len(values))) * curve.usual_height(residuals))
    high = (scores > SPIKE_Z) & (residuals > floor)
    return [int(step) for step in series.steps[high]], float(scores[high].max()) if high.any() else 0.0


def spikes(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """Two or more losses with a modified Z-score above 7 against the trend: the dual-GPU study's 3.5, doubled because
    a run has thousands of points; each at least 10 % above the trend, and beyond the tail of the noise."""
    found, score = spike_steps(run)
    if len(found) < SPIKES or diverging(run) is not None or _clipped_far(run):
        return None
    total, most = max(len(losses(run)), 1), _max_norm(run)
    return Finding(
        rule="spikes",
        headline="The loss has spikes",
        figures=(f"{len(found)} of {total} losses stand out", f"modified Z-score up to {number(score)}"),
        evidence=f"Spikes at {named(found, 8)}: modified Z-score above {SPIKE_Z:.0f} against the trend, up to "
        f"{number(score)}.",
        advice=f"look at the rows of {named(found, 3)} (each step of the plan has fixed rows); "
        f"training.max_grad_norm: {number(most / 2 if most else 0.5)}",
        gain=f"{counted(len(found), 'step')} ({percent(len(found) / total)}) that do not disturb the others",
        lost=len(found) / total,
        confidence="high" if score >= 2 * SPIKE_Z else "medium",
        charts=("loss", "gradient_norm"),
    )


def frozen(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """The gradient norm is below 1e-8, or the loss stays within its noise over the whole run while the learning rate
    is above 0, by definition. The evaluation loss has no noise and decides if there are two; the noise of the training
    loss must be small enough to have shown a fall of 0.3 %."""
    norms = run.series("gradient_norm").finite()
    rates = run.series("learning_rate").finite()
    trains = not len(rates) or float(rates.values.max()) > 0
    series = losses(run)
    figures: tuple[str, str] | None = None
    if trains and len(norms) >= 3 and float(np.median(norms.values)) < FROZEN_NORM:
        figures = (f"gradient norm {number(float(np.median(norms.values)))}", f"threshold {FROZEN_NORM:g}")
    elif trains and (same := _same_evaluations(run)) is not None:
        figures = (f"evaluation loss {same[0]:.6g} before and after", f"relative change {same[1]:.1g}")
    elif trains and len(series) >= FROZEN_STEPS and _flat(series.values) and len(run.series("eval_loss").finite()) < 2:
        fall = curve.level(series.values, 0, 0.25) - curve.level(series.values, 0.75, 1)
        figures = (f"loss fell by {number(fall)}", f"noise {number(curve.noise(series.values))}")
    if figures is None:
        return None
    return Finding(
        rule="frozen",
        headline="The weights do not train",
        figures=figures,
        evidence=f"{figures[0]}, {figures[1]}, over {len(series)} losses at a learning rate of up to "
        f"{number(float(rates.values.max())) if len(rates) else 'not recorded'}.",
        advice="check what trains: lora.target_modules, lora.modules_to_save and the loss mask (`finetune prepare` "
        "shows one row with its supervised tokens)",
        gain=f"{counted(run.steps or len(series), 'step')} that train",
        lost=1.0,
        confidence="medium" if "fell" in figures[0] else "high",
        charts=("loss", "gradient_norm", "learning_rate"),
    )


def _flat(values: np.ndarray) -> bool:
    """Whether the first and the last quarter agree within the noise, which is small."""
    error = curve.error_of_difference(values, 0.25)
    usual = abs(float(np.median(values)))
    fall = curve.level(values, 0, 0.25) - curve.level(values, 0.75, 1)
    return usual > 0 and error <= FROZEN_ERROR * usual and abs(fall) <= 2 * error


def _same_evaluations(run: Run) -> tuple[float, float] | None:
    """The evaluation loss and its relative change, if it did not change over the run."""
    values = run.series("eval_loss").finite().values
    if len(values) < 2 or float(values.min()) <= 0:
        return None
    change = float(values.max() - values.min()) / float(np.median(values))
    return (float(values[-1]), change) if change <= FROZEN_EVALUATION else None


def clipped_share(run: Run) -> float | None:
    """Share of the steps after warm-up whose gradient was clipped."""
    series = run.series("clipped").finite()
    if len(series):
        later = series.after(_warm_up(run))
        return float(np.mean((later if len(later) else series).values))
    norms, most = run.series("gradient_norm").finite().after(_warm_up(run)), _max_norm(run)
    return float(np.mean(norms.values > most)) if len(norms) and most else None


def clipping(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """At least 90 % of the steps after warm-up are clipped, and the loss has spikes or rises. Calibrated. `diverging`
    has precedence, and `spikes` as well unless gradients are ten times max_grad_norm."""
    share = clipped_share(run)
    if share is None or share < CLIPPED or diverging(run) is not None or spikes(run) is not None:
        return None
    found, (spiky, _) = rise(run), spike_steps(run)
    rises = found is not None and len(losses(run)) >= CLIPPED_STEPS and found.is_above(CLIPPED_RISE)
    if len(spiky) < SPIKES and not rises:
        return None
    norms, most = run.series("gradient_norm").finite().after(_warm_up(run)), _max_norm(run)
    usual = float(np.median(norms.values)) if len(norms) else math.nan
    height = number(found.last - found.least) if found is not None else "0"
    course = f"spikes at {named(spiky)}" if len(spiky) >= SPIKES else f"the loss rose by {height}"
    return Finding(
        rule="clipping",
        headline="Nearly all gradients are clipped",
        figures=(f"{percent(share)} of the steps", course),
        evidence=f"{percent(share)} of the steps after warm-up are clipped (threshold {percent(CLIPPED)}): median "
        f"gradient norm {number(usual)}, training.max_grad_norm {number(most) if most else 'not recorded'}; {course}.",
        advice=f"{lower_rate(run)}"
        + (f"; training.max_grad_norm: {number(2 * usual)}" if math.isfinite(usual) else ""),
        gain=f"{percent(share)} of the steps keep the size of their gradient",
        confidence="medium",
        charts=("clipped", "gradient_norm", "loss"),
    )


def unchanged(run: Run) -> float | None:
    """Median share of the trained weights that a step left unchanged; None if that is not recorded, or how stochastic
    rounding works."""
    series = run.series("weights_unchanged").finite()
    if not len(series) or run.text("master_weights.kind") == "stochastic":
        return None
    return float(np.median(series.values))


def updates_lost(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """Half of the recorded steps leave at least 20 % of the trained weights exactly as they were: the updates are
    smaller than the spacing of the weights' type. Calibrated."""
    share = unchanged(run)
    if share is None or share < UNCHANGED:
        return None
    kept = run.text("master_weights.kind") or "not recorded"
    return Finding(
        rule="updates-lost",
        headline="Updates are lost to rounding",
        figures=(f"{percent(share)} of the trained weights unchanged by a step", f"threshold {percent(UNCHANGED)}"),
        evidence=f"In the median recorded step, {percent(share)} of the sampled weights that have a gradient keep "
        f"their value (threshold {percent(UNCHANGED)}). dtype {run.text('dtype') or 'not recorded'}, "
        f"training.master_weights {kept}, learning rate {_rate_at(run, run.steps or 0)}.",
        advice="training.master_weights: auto (a script loads the model with dtype=torch.float32 and sets bf16=True)",
        gain=f"{percent(share)} more weights that learn from a step",
        charts=("weights_unchanged", "loss"),
    )


def overfitting(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """At the last two evaluations the loss is at least 1.02 times its minimum, while the training loss falls.
    Calibrated."""
    found = overfit(run)
    if found is None or found < OVERFIT - 1:
        return None
    series = run.series("eval_loss").finite()
    place = int(series.values.argmin())
    least, best = float(series.values[place]), int(series.steps[place])
    training = losses(run)
    then, now = _loss_around(training, best), _loss_around(training, int(training.steps[-1]) if len(training) else 0)
    if then is None or now is None or now >= then:
        return None
    total = run.steps or int(series.steps[-1])
    checkpoint = checkpoint_before(run, best)
    end = float(series.values[-1])
    return Finding(
        rule="overfitting",
        headline=f"The model overfits from step {best} on",
        figures=(f"evaluation loss {number(end)} at the end", f"{number(least)} at step {best}"),
        evidence=f"The evaluation loss was lowest at step {best}, {number(least)}, and is {end / least:.2f} times that "
        f"(threshold {OVERFIT}), while the training loss fell from {number(then)} to {number(now)}.",
        advice=f"training.max_steps: {max(best, 1)}" + (f"; use {checkpoint}" if checkpoint else "; save_steps there"),
        gain=f"{percent(1 - least / end)} lower evaluation loss, {counted(total - best, 'step')} saved",
        lost=(total - best) / max(total, 1),
        confidence="high" if end >= 1.05 * least else "medium",
        charts=("eval_loss", "loss"),
    )


def overfit(run: Run) -> float | None:
    """How far the last evaluations all are above the least one before them, as a share of it."""
    values = run.series("eval_loss").finite().values
    if len(values) <= OVERFIT_LAST or float(values.min()) <= 0:
        return None
    return max(float(values[-OVERFIT_LAST:].min()) / float(values[:-OVERFIT_LAST].min()) - 1, 0.0)


def _loss_around(series: Series, step: int) -> float | None:
    """Median of the tenth of the losses that ends at a step."""
    before = series.values[series.steps <= step]
    width = max(5, len(series) // 10)
    return float(np.median(before[-width:])) if len(before) else (series.values[0] if len(series) else None)


def _clipped_far(run: Run) -> bool:
    """Whether nearly all gradients are clipped, and by a factor that single rows do not explain."""
    share, most = clipped_share(run), _max_norm(run)
    norms = run.series("gradient_norm").finite().after(_warm_up(run))
    far = bool(most) and len(norms) > 0 and float(np.median(norms.values)) >= CLIPPED_FAR * (most or 1.0)
    return far and share is not None and share >= CLIPPED


def _warm_up(run: Run) -> int:
    """Steps of the learning rate's warm-up, at least those of the machine's."""
    asked = run.number("config.training.warmup_steps") or 0.0
    return max(int(asked if asked >= 1 else asked * (run.steps or 0)), run.warm_up)


def _max_norm(run: Run) -> float | None:
    return run.number("config.training.max_grad_norm") or None


def _rate_at(run: Run, step: int) -> str:
    rates = run.series("learning_rate").finite()
    before = rates.values[rates.steps <= step]
    return number(float(before[-1])) if len(before) else "not recorded"


def lower_rate(run: Run) -> str:
    rate = run.number("config.training.learning_rate")
    if rate is None:
        rates = run.series("learning_rate").finite()
        rate = float(rates.values.max()) if len(rates) else None
    return f"training.learning_rate: {rate / 3:.2g}" if rate else "a third of the learning rate"


def checkpoint_before(run: Run, step: int) -> str | None:
    """Name of the newest checkpoint up to a step that is still there."""
    if run.output is None:
        return None
    found = [re.fullmatch(r"checkpoint-(\d{1,12})", path.name) for path in run.output.glob("checkpoint-*")]
    steps = [int(match.group(1)) for match in found if match and int(match.group(1)) <= step]
    return f"checkpoint-{max(steps)}" if steps else None
