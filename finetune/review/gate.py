"""Runs judged against a baseline run by figures of run.json: `finetune review BASELINE RUN --max-slowdown 5`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from finetune.errors import UserError
from finetune.review.values import mapping, number, sequence, text
from finetune.runtime.types import JsonObject

FINISHED = (None, "done")  # status of a run whose figures are final; records of other programs may lack it
_ROUNDING = 1e-9  # percent: 1.05 / 1.00 is not more than 5 % slower


@dataclass(frozen=True)
class Comparison:
    """One figure of a run beside the baseline's.

    Attributes:
        change_percent: from the baseline to the run; negative if the figure is smaller.
        limit_percent: the largest change for the worse that `option` allows.
    """

    run: str
    figure: str
    baseline: float
    value: float
    change_percent: float
    option: str
    limit_percent: float

    @property
    def breached(self) -> bool:
        """Whether the run is worse by more than the limit."""
        worse = -self.change_percent if self.figure in _HIGHER_IS_BETTER else self.change_percent
        return worse > self.limit_percent + _ROUNDING

    def __str__(self) -> str:
        moved = "rose" if self.change_percent > 0 else "fell" if self.change_percent < 0 else "did not change"
        by = f" by {abs(self.change_percent):.2f} %" if self.change_percent else ""
        return (
            f"{self.run}: {self.figure} {moved}{by}, from {self.baseline:.6g} to {self.value:.6g}; "
            f"{self.option} allows {self.limit_percent:g} %"
        )

    def to_dict(self) -> JsonObject:
        """As JSON."""
        return asdict(self) | {"breached": self.breached}


_HIGHER_IS_BETTER = ("tokens_per_second_per_gpu",)


def compare(records: Mapping[str, Mapping[str, object]], limits: Mapping[str, float]) -> list[Comparison]:
    """Every figure that the limits name, of every run against the first.

    Args:
        records: content of run.json by the run's name, the baseline first.
        limits: how much worse than the baseline a run may be, in percent, by option: of `--max-slowdown` more time per
            step and fewer tokens/s per device, of `--max-loss-increase` more loss in the last step and evaluation.

    Raises:
        UserError: a run is not finished, or lacks a figure that another run of its pair has or every run must have.
    """
    (baseline, first), *others = records.items()
    if not others:
        options = " and ".join(limits)
        raise UserError(
            f"{options} compares runs with the first one, and there is only one: {baseline}. Give the baseline first, "
            "then the runs to judge."
        )
    for name, record in records.items():
        status = text(record.get("status"))
        if status not in FINISHED:
            raise UserError(f"{name} has not finished: its status is {status}. Give a run with the status done.")
    return [
        _compared(baseline, name, figure, option, limit, known, figures.get(figure))
        for name, record in others
        for option, limit in limits.items()
        for figures in [_FIGURES[option](record)]
        for figure, known in (dict.fromkeys(figures) | _FIGURES[option](first)).items()
    ]


def _compared(
    baseline: str, run: str, figure: str, option: str, limit: float, known: float | None, value: float | None
) -> Comparison:
    for name, one in ((baseline, known), (run, value)):
        if one is None:
            raise UserError(f"{option} needs {figure}, and run.json of {name} has no finite value of it.")
    assert known is not None and value is not None
    if known <= 0:
        raise UserError(f"{option} is a percentage of the baseline's {figure}, and that of {baseline} is {known:g}.")
    return Comparison(run, figure, known, value, 100 * (value - known) / known, option, limit)


def _speed(record: Mapping[str, object]) -> dict[str, float | None]:
    return {name: number(record.get(name)) for name in ("step_seconds_median", "tokens_per_second_per_gpu")}


def _losses(record: Mapping[str, object]) -> dict[str, float | None]:
    """The loss of the last optimizer step; `eval_loss_after` too if it is recorded, which is one number or one per
    evaluation set."""
    evaluated = record.get("eval_loss_after")
    after = {f"eval_loss_after.{name}": number(loss) for name, loss in mapping(evaluated).items()}
    if evaluated is not None and not after:
        after = {"eval_loss_after": number(evaluated)}
    return {"the last of losses": number(next(reversed(sequence(record.get("losses"))), None))} | after


_FIGURES = {"--max-slowdown": _speed, "--max-loss-increase": _losses}


def lines(comparisons: Sequence[Comparison]) -> list[str]:
    """What the command prints: a sentence per breach, or one that all passed; nothing if nothing was compared."""
    if not comparisons:
        return []
    breached = [str(one) for one in comparisons if one.breached]
    if breached:
        return [f"gate: {sentence}." for sentence in breached]
    return [f"gate: passed, {len(comparisons)} figures compared."]
