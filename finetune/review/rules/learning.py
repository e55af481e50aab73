"""Whether the run learns, judged by its curves."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from finetune.review import events
from finetune.review.events import Series
from finetune.review.finding import Finding, confidence, number, percent
from finetune.review.finding import steps as named
from finetune.review.rules import curve
from finetune.review.run import Run
from finetune.runtime import tags
from finetune.text import counted

FEWEST = 15  # losses, for a statement about their course
RISE = 1.2  # last tenth by the least running median; calibrated
RISE_NOISE = 2.0  # standard deviations of a single loss
RISE_ERRORS = 5.0  # standard errors of the two medians, which matter in short runs: the least is the least of many
RISE_OF_FALL = 0.02  # of the fall from the first losses to the least: a floor of nearly zero doubles by chance
HELD_OUT = 1.02  # held-out loss after training by the one before, or by its least at two evaluations; calibrated
HELD_OUT_NATS = 0.01  # and by so much: 1 % of the perplexity. House rule
HELD_OUT_LAST = 2  # evaluations in a row; of a single one, which may be a bad moment, RISE is needed
MOVED = 0.005  # of the held-out loss; calibrated, from the other side
KNOWN = 0.05  # nats: a held-out loss below has nothing left to fall by
USUAL_RATES = {True: "1e-5 to 5e-5", False: "1e-4 to 5e-4"}  # by full_finetuning: about the defaults of `finetune init`
LOW_RATES, HIGH_RATES = {True: 1e-5, False: 1e-4}, {True: 5e-5, False: 5e-4}
ANSWERS = 0.5  # of the answers to held-out prompts: more are broken than not. House rule
ANSWERS_MORE = 0.25  # of them more than before training, and at least 2
ANSWERS_FEWEST, ANSWERS_STEPS = 3, 10  # fewer answers or steps prove little
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
CLIPPED_RISE = 1.05  # instead of RISE if so many are clipped
UNCHANGED = 0.20  # of the trained weights; calibrated, and the least that is worth a warning
UNCHANGED_RECORDS = 3  # at least
UNCHANGED_RATE = 0.01  # of the run's highest learning rate: below, a step barely changes a weight of any type


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
        evidence=f"NaN or infinity in {where}. dtype {dtype}, learning rate {_rate_up_to(run)}.",
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


def divergence(values: Sequence[float], evaluations: Series) -> str | None:
    """Whether a run with these losses of all its steps, and these held-out losses, diverges by the rule below, as a
    sentence; for a run that is to stop itself."""
    kept = np.array([value for value in values if math.isfinite(value)])
    found, held_out = rise_of(np.arange(1, len(kept) + 1), kept), rise_of_held_out(evaluations)
    if found is not None and found.is_above(RISE):
        return f"loss {number(found.last)}, the lowest was {number(found.least)} at step {found.least_step}"
    if found is not None and held_out is not None and held_out.worse and not _fell(kept):
        return f"held-out loss {number(held_out.last)}, {number(held_out.before or 0.0)} before training"
    return None


@dataclass(frozen=True)
class HeldOutRise:
    """How far the held-out loss has risen.

    Attributes:
        name: of the set, in parentheses; empty if there is one.
        before: before training, if that is recorded.
    """

    before: float | None
    least: float
    least_step: int
    last: float
    name: str = ""

    @property
    def loss(self) -> str:
        """What rose, in words."""
        return f"held-out loss {self.name}".strip()

    @property
    def worse(self) -> bool:
        """Whether it is above the one before training."""
        return self.before is not None and is_above_held_out(self.last, self.before)


def is_above_held_out(loss: float, earlier: float, factor: float = HELD_OUT) -> bool:
    """Whether a held-out loss is above an earlier one. The rows are the same, so there is no sampling noise."""
    return loss > factor * earlier and loss - earlier >= HELD_OUT_NATS


def held_out(run: Run) -> dict[str, Series]:
    """The finite held-out losses by set, from step 0 on; the last one is that of the final model. Of a resumed run, and
    if the best model was loaded, run.json alone has the ends."""
    tag = tags.BY_NAME["eval_loss"].tag
    sets = {name.removeprefix(tag).strip(): run.scalars[name] for name in run.scalars if name.startswith(f"{tag} (")}
    if len(only := run.series("eval_loss")):
        ends = {0: run.number("eval_loss_before"), run.steps or int(only.steps[-1]): run.number("eval_loss_after")}
        known = {step: loss for step, loss in ends.items() if loss is not None}
        only = events.join(only, events.of([*known], [*known.values()]))
    return {name: one.finite() for name, one in ({"": only} | sets).items() if len(one.finite())}


def held_out_rise(run: Run) -> HeldOutRise | None:
    """The rise of the held-out loss; of several sets, of the one that rose most."""
    found = [replace(one, name=name) for name, series in held_out(run).items() if (one := rise_of_held_out(series))]
    return max(found, key=lambda one: one.last / max(one.least, 1e-12), default=None)


def rise_of_held_out(series: Series) -> HeldOutRise | None:
    """The rise, if there is one: from before training, over RISE in the last evaluation, or in the last two."""
    values = series.values
    if len(values) < 2:
        return None
    place = int(values.argmin())
    found = HeldOutRise(
        before=float(values[0]) if series.steps[0] == 0 else None,
        least=float(values[place]),
        least_step=int(series.steps[place]),
        last=float(values[-1]),
    )
    earlier = values[:-HELD_OUT_LAST]
    lasting = len(earlier) > 0 and is_above_held_out(float(values[-HELD_OUT_LAST:].min()), float(earlier.min()))
    return found if found.worse or lasting or is_above_held_out(found.last, found.least, RISE) else None


def _fell(values: np.ndarray) -> bool:
    """Whether the last losses are below the first ones, and below the very first, that of the untrained model."""
    end = max(3, len(values) // 10)
    return len(values) > 1 and float(np.median(values[-end:])) < min(float(values[0]), float(np.median(values[:3])))


def rise_of(steps: np.ndarray, values: np.ndarray) -> Rise | None:
    """The rise of finite losses at these steps, or None with too few of them."""
    if len(values) < FEWEST:
        return None
    width = max(5, len(values) // 10)
    end = max(3, len(values) // 10)
    medians = curve.window_medians(values, width)
    place = int(medians.argmin())
    least, last, noise = float(medians[place]), float(np.median(values[-end:])), curve.noise(values)
    if values[0] < least and _is_far_above_first(values, end):
        return Rise(float(values[0]), int(steps[0]), last, noise, error=0.0, fall=0.0)
    return Rise(
        least=least,
        least_step=int(steps[min(place + width // 2, len(values) - 1)]),
        last=last,
        noise=noise,
        error=noise * 1.2533 * math.sqrt(1 / width + 1 / end),
        fall=max(float(np.median(values[:3])) - least, 0.0),
    )


def _is_far_above_first(values: np.ndarray, end: int) -> bool:
    """Whether the last losses are above the very first. A rate that is far too high ruins the model within a step or
    two, and then no other is left to compare with. Of logarithms, since a ruined loss has a large noise."""
    logs = np.log(np.maximum(values, 1e-12))
    height = float(np.median(logs[-end:]) - logs[0])
    return height > max(math.log(RISE), RISE_ERRORS * curve.noise(logs) * math.sqrt(1 + 1.2533**2 / end))


def rises(run: Run) -> bool:
    """Whether the training loss rises. Clipping hides how far: the steps of a run whose gradients are all clipped have
    one length."""
    found = rise(run)
    return found is not None and found.is_above(CLIPPED_RISE if (clipped_share(run) or 0.0) >= CLIPPED else RISE)


def diverging(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """The held-out loss rises, to 1.02 times the one before training or its least, and the training loss does not fall;
    or the median training loss of the last tenth is above 1.2 times the least running median or the first loss (1.05
    times if 90 % of the steps after warm-up are clipped), by at least twice the noise (1.4826 MAD) and 2 % of the fall
    before. Calibrated."""
    up, found, held = rises(run), rise(run), held_out_rise(run)
    if not up and (held is None or overfitting(run) is not None):
        return None
    sentences, step = [], 0
    headline, figures = "The run diverges: its loss rises", ("", "")
    if up and found is not None:
        step = found.least_step
        figures = (f"loss {number(found.last)} at the end", f"{number(found.least)} at step {step}")
        sentences.append(
            f"Median loss of the last tenth {number(found.last)}: {number(found.last / max(found.least, 1e-12))} times "
            f"the lowest, {number(found.least)} at step {step} (threshold {RISE}); noise {number(found.noise)}."
        )
    if held is not None:
        step, loss = held.least_step, held.loss
        then = "before training" if held.worse else f"at step {step}"
        was = (held.before or 0.0) if held.worse else held.least
        headline = "The run made the model worse" if held.worse else "The run diverges: its held-out loss rises"
        figures = (f"{loss} {number(was)} {then}", f"{number(held.last)} after training")
        sentences.append(f"The {loss} was {number(was)} {then}, and is {number(held.last)} (threshold {HELD_OUT}).")
    if (clipped := clipped_share(run)) is not None and clipped >= CLIPPED:
        sentences.append(f"{percent(clipped)} of the steps are clipped.")
    if (broken := run.number("broken_answers_after")) is not None and broken >= ANSWERS:
        sentences.append(f"{percent(broken)} of the answers are empty or repeat themselves.")
    checkpoint = checkpoint_before(run, step) if step else None
    total = run.steps or step
    return Finding(
        rule="diverging",
        headline=headline,
        figures=figures,
        evidence=" ".join(sentences),
        advice=f"{lower_rate(run)} or lower ({usual_rates(run)}); training.warmup_steps: {max(total // 20, 1)}"
        + (f"; the best checkpoint is {checkpoint}" if checkpoint else ""),
        gain=f"a model that is better than before training, and the {counted(total - step, 'step')} since step {step}",
        lost=(total - step) / max(total, 1),
        confidence="high" if held is not None or (found and found.last - found.least >= 4 * found.noise) else "medium",
        charts=("loss", "eval_loss", "gradient_norm", "learning_rate"),
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
    if len(found) < SPIKES or diverging(run) is not None:
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
    is above 0, by definition. The evaluation loss has no noise and decides if there are two: neither it has moved by
    0.5 % nor has the training loss fallen. Else the noise of the training loss must be small enough to have shown a
    fall of 0.3 %."""
    norms, series, rate = run.series("gradient_norm").finite(), losses(run), run.series("learning_rate").highest
    trains = rate is None or rate > 0
    figures: tuple[str, str] | None = None
    headline = "The weights do not train"
    advice = (
        "check what trains: lora.target_modules, lora.modules_to_save and the loss mask (`finetune prepare` shows one "
        "row with its supervised tokens)"
    )
    if trains and len(norms) >= 3 and float(np.median(norms.values)) < FROZEN_NORM:
        figures = (f"gradient norm {number(float(np.median(norms.values)))}", f"threshold {FROZEN_NORM:g}")
    elif trains and (held := _unmoved(run)) is not None:
        figures = (
            f"held-out loss {held[0]:.5g} before training, {held[1]:.5g} after",
            f"change {percent(held[1] / held[0] - 1)}",
        )
        if abs(held[1] - held[0]) > FROZEN_EVALUATION * held[0]:
            full = run.at("config.model.full_finetuning") is True
            more = f", more steps, or {advice}" if rate is None or rate >= LOW_RATES[full] else ""
            headline, advice = "The model did not learn", f"a higher training.learning_rate ({usual_rates(run)}){more}"
    elif trains and len(series) >= FROZEN_STEPS and len(held_out(run).get("", events.empty())) < 2:
        figures = _flat(series.values)
    if figures is None:
        return None
    return Finding(
        rule="frozen",
        headline=headline,
        figures=figures,
        evidence=f"{figures[0]}, {figures[1]}, over {len(series)} losses, learning rate {_rate_up_to(run)}.",
        advice=advice,
        gain=f"{counted(run.steps or len(series), 'step')} that train",
        lost=1.0,
        confidence="medium" if "fell" in figures[0] else "high",
        charts=("loss", "gradient_norm", "learning_rate"),
    )


def _flat(values: np.ndarray) -> tuple[str, str] | None:
    """The fall from the first quarter to the last, and the noise, if they agree within the noise, which is small."""
    error = curve.error_of_difference(values, 0.25)
    usual = abs(float(np.median(values)))
    fall = curve.level(values, 0, 0.25) - curve.level(values, 0.75, 1)
    flat = usual > 0 and error <= FROZEN_ERROR * usual and abs(fall) <= 2 * error
    return (f"loss fell by {number(fall)}", f"noise {number(curve.noise(values))}") if flat else None


def _unmoved(run: Run) -> tuple[float, float] | None:
    """The held-out loss before and after training, if it did not change; or hardly, while the training loss did not
    fall."""
    series, values = held_out(run).get("", events.empty()).values, losses(run).values
    if len(series) < 2 or series[0] <= 0:
        return None
    first, last = float(series[0]), float(series[-1])
    if float(series.max() - series.min()) <= FROZEN_EVALUATION * first:
        return first, last
    hardly = len(values) >= FEWEST and first >= KNOWN and abs(last - first) <= MOVED * first
    fall = curve.level(values, 0, 0.25) - curve.level(values, 0.75, 1) if hardly else math.inf
    return (first, last) if fall <= 2 * curve.error_of_difference(values, 0.25) else None


def answers(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """At least half of 3 or more answers to held-out prompts are empty or repeat themselves after 10 steps or more: 2
    answers and a quarter of all more than before training, though the run does not diverge. House rule."""
    share, before = run.number("broken_answers_after") or 0.0, run.number("broken_answers_before") or 0.0
    count = int(run.number("answers_scored") or 0)
    few = count < ANSWERS_FEWEST or (run.steps or 0) < ANSWERS_STEPS
    more = round((share - before) * count)
    if few or share < ANSWERS or more < max(2, ANSWERS_MORE * count) or diverging(run) is not None:
        return None
    return Finding(
        rule="answers",
        headline="The answers are empty or repeat themselves",
        figures=(f"{percent(share)} of the answers after training", f"{percent(before)} before"),
        evidence=f"{percent(share)} of {count} answers to held-out prompts are empty or end in a "
        f"repetition (threshold {percent(ANSWERS)}); {percent(before)} before training.",
        advice="look at the rows with `finetune prepare`: no empty answers (data.keep_empty: false drops them), and an "
        f"end of each; {lower_rate(run)} or lower ({usual_rates(run)})",
        gain=f"up to {percent(share - before)} more answers that can be read",
        confidence=confidence(share, ANSWERS, count),
        charts=("loss", "eval_loss"),
    )


def clipped_share(run: Run) -> float | None:
    """Share of the steps after warm-up whose gradient was clipped."""
    series = run.series("clipped").finite()
    if len(series):
        later = series.after(_warm_up(run))
        return float(np.mean((later if len(later) else series).values))
    norms, most = run.series("gradient_norm").finite().after(_warm_up(run)), _max_norm(run)
    return float(np.mean(norms.values > most)) if len(norms) and most else None


def unchanged(run: Run) -> float | None:
    """Median share of the trained weights that a step left unchanged; None if too few steps with a learning rate of 1 %
    of the highest or more are recorded, or if that is how stochastic rounding works."""
    series, rates = run.series("weights_unchanged").finite(), run.series("learning_rate").finite()
    if len(rates):
        rate = rates.values[np.maximum(np.searchsorted(rates.steps, series.steps, side="right") - 1, 0)]
        series = series.part(rate >= UNCHANGED_RATE * rates.values.max())
    judged = len(series) >= UNCHANGED_RECORDS and run.text("master_weights.kind") != "stochastic"
    return float(np.median(series.values)) if judged else None


def updates_lost(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """Half of the recorded steps, at least 3 whose learning rate is 1 % of the highest or more, leave at least 20 % of
    the trained weights exactly as they were: the updates are smaller than the spacing of the weights' type.
    Calibrated."""
    share = unchanged(run)
    if share is None or share < UNCHANGED:
        return None
    kept = run.text("master_weights.kind") or "not recorded"
    wider = "training.master_weights: auto (a script loads the model with dtype=torch.float32 and sets bf16=True)"
    return Finding(
        rule="updates-lost",
        headline="Updates are lost to rounding",
        figures=(f"{percent(share)} of the trained weights unchanged by a step", f"threshold {percent(UNCHANGED)}"),
        evidence=f"In the median recorded step, {percent(share)} of the sampled weights that have a gradient keep "
        f"their value (threshold {percent(UNCHANGED)}). dtype {run.text('dtype') or 'not recorded'}, "
        f"training.master_weights {kept}, learning rate {_rate_up_to(run)}.",
        advice=f"a higher training.learning_rate ({usual_rates(run)})" if kept == "float32" else wider,
        gain=f"{percent(share)} more weights that learn from a step",
        charts=("weights_unchanged", "loss"),
    )


def overfitting(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """The held-out loss rises as in `diverging`, while the training loss falls. Calibrated."""
    found, training = held_out_rise(run), losses(run)
    if found is None or rises(run):
        return None
    least, best, end = found.least, found.least_step, found.last
    then, now = _loss_around(training, best), _loss_around(training, int(training.steps[-1]) if len(training) else 0)
    if then is None or now is None or now >= then or (found.worse and not _fell(training.values)):
        return None
    total = run.steps or int(training.steps[-1])
    checkpoint = checkpoint_before(run, best)
    return Finding(
        rule="overfitting",
        headline=f"The model overfits from step {best} on",
        figures=(f"held-out loss {number(end)} at the end", f"{number(least)} at step {best}"),
        evidence=f"The {found.loss} was lowest at step {best}, {number(least)}, and is "
        f"{end / max(least, 1e-12):.2f} times that (threshold {HELD_OUT}), while the training loss fell from "
        f"{number(then)} to {number(now)}."
        + (" No held-out answer is right." if run.number("exact_match_after") == 0 else ""),
        advice="more, or more varied, rows; otherwise "
        + (f"take {checkpoint}" if checkpoint else f"training.max_steps: {max(best, 1)}"),
        gain=f"{percent(1 - least / end)} lower held-out loss, {counted(total - best, 'step')} saved",
        lost=(total - best) / max(total, 1),
        confidence="high" if end >= 1.05 * least else "medium",
        charts=("eval_loss", "loss"),
    )


def _loss_around(series: Series, step: int) -> float | None:
    """Median of the tenth of the losses that ends at a step."""
    before = series.values[series.steps <= step]
    width = max(5, len(series) // 10)
    return float(np.median(before[-width:])) if len(before) else (series.values[0] if len(series) else None)


def _warm_up(run: Run) -> int:
    """Steps of the learning rate's warm-up, at least those of the machine's."""
    asked = run.number("config.training.warmup_steps") or 0.0
    return max(int(asked if asked >= 1 else asked * (run.steps or 0)), run.warm_up)


def _max_norm(run: Run) -> float | None:
    return run.number("config.training.max_grad_norm") or None


def _rate_up_to(run: Run) -> str:
    rate = run.series("learning_rate").highest
    return "not recorded" if rate is None else f"up to {number(rate)}"


def lower_rate(run: Run) -> str:
    rate = run.number("config.training.learning_rate") or run.series("learning_rate").highest
    full = run.at("config.model.full_finetuning")
    usual = HIGH_RATES[full] if isinstance(full, bool) else math.inf
    return f"training.learning_rate: {min(rate / 3, usual):.2g}" if rate else "a third of the learning rate"


def usual_rates(run: Run) -> str:
    """The range of learning rates to try."""
    full, lora = (f"{USUAL_RATES[one]} for {name}" for one, name in ((True, "full fine-tuning"), (False, "LoRA")))
    known = run.at("config.model.full_finetuning")
    return f"usual: {full if known is True else lora if known is False else f'{full}, {lora}'}"


def checkpoint_before(run: Run, step: int) -> str | None:
    """Name of the newest checkpoint up to a step that is still there."""
    paths = run.output.glob("checkpoint-*") if run.output else ()
    found = [re.fullmatch(r"checkpoint-(\d{1,12})", path.name) for path in paths]
    steps = [int(match.group(1)) for match in found if match and int(match.group(1)) <= step]
    return f"checkpoint-{max(steps)}" if steps else None
