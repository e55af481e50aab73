"""A review of one run or several, as the dictionary that the page, the TensorBoard tab and `--json` share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from finetune.config.schema import DEFAULTS
from finetune.redact import redact_tree
from finetune.review import run as runs
from finetune.review.events import finite_median
from finetune.review.finding import Finding
from finetune.review.rules import memory, speed
from finetune.review.rules.ranks import scaling
from finetune.review.run import Run
from finetune.review.values import mapping, number, sequence, text
from finetune.review.verdict import Half, findings, verdict
from finetune.runtime import tags
from finetune.runtime.files import to_json_types
from finetune.runtime.types import JsonObject

MOST_POINTS = 400  # of a curve
MOST_TAGS = 8  # pinned for a finding
AT_TOKENS = (0.25, 0.5, 0.75, 1.0)  # where learning curves are compared: shares of the tokens that all have seen
PREDICTED = ("step_seconds", "peak_memory_gib", "tokens_per_second_per_gpu")


@dataclass(frozen=True)
class Reviewed:
    """A run and what the rules found."""

    run: Run
    name: str  # unique in its review
    findings: list[Finding]
    verdict: tuple[Half, Half]

    def to_dict(self) -> JsonObject:
        """As JSON."""
        run = self.run
        return {
            "run": self.name,
            "folder": str(run.folder),
            "verdict": " ".join(map(str, self.verdict)),
            "halves": [vars(half) for half in self.verdict],
            "status": run.status,
            "about": about(run),
            "findings": [one.to_dict() for one in self.findings],
            "change_first": self.findings[0].advice if self.findings else None,
            "metrics": metrics(run),
            "bars": bars(run),
            "curve": curve(run),
            "evaluations": evaluations(run),
            "ranks": ranks(run),
            "predicted": predicted(run),
            "charts": {one.rule: charts(run, one) for one in self.findings},
            "problems": list(run.problems),
        }


@dataclass(frozen=True)
class Review:
    """Reviews of runs, and their comparison."""

    runs: list[Reviewed]

    def to_dict(self) -> JsonObject:
        """As JSON: numbers are finite or null, secrets masked."""
        content = {"runs": [one.to_dict() for one in self.runs], "comparison": comparison(self.runs)}
        return to_json_types(redact_tree(content))

    @property
    def warned(self) -> bool:
        """Whether a rule of level warning fired."""
        return any(one.level == "warning" for each in self.runs for one in each.findings)


def review(folders: Sequence[Path]) -> Review:
    """Read and judge runs.

    Raises:
        UserError: a folder holds no run.
    """
    read = [runs.read(folder) for folder in folders]
    reviewed = []
    for run, name in zip(read, unique_names(read), strict=True):
        found = findings(run, [other for other in read if other is not run])
        reviewed.append(Reviewed(run=run, name=name, findings=found, verdict=verdict(run, found)))
    return Review(reviewed)


def unique_names(read: Sequence[Run]) -> list[str]:
    """The runs' names; with the folder above where two are alike, then with a number."""
    names = [run.name for run in read]
    for place, run in enumerate(read):
        if names.count(run.name) > 1:
            above = text((run.output or run.folder).absolute().parent.name)
            names[place] = f"{above}/{run.name}" if above else run.name
    seen: dict[str, int] = {}
    for place, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        names[place] = name if seen[name] == 1 else f"{name} ({seen[name]})"
    return names


# --- parts of a run -------------------------------------------------------------------------------------------------


def about(run: Run) -> JsonObject:
    """What ran: when, model, rows, hardware, versions, and the settings that differ from their defaults."""
    model = text(run.at("config.model.model_name_or_path"))
    versions = {text(name) or "?": text(one) for name, one in mapping(run.at("versions")).items()}
    return {
        "began": run.began,
        "ended": run.ended,
        "model": model,
        "model_id": run.model_id,
        "data": _sources(run),
        "hardware": run.hardware,
        "world_size": run.world_size,
        "steps": run.steps,
        "resumed_at": run.resumed_at,
        "versions": {name: one for name, one in versions.items() if one},
        "settings": {
            key: value
            for key, value in settings(run).items()
            if key in DEFAULTS.keys() - _NAMED_BEFORE and value != _shown(DEFAULTS[key])
        },
    }


_NAMED_BEFORE = {"model.model_name_or_path", "training.output_dir", "training.overwrite_output_dir"}


def _sources(run: Run) -> list[str]:
    """Where the training rows came from, and the held-out rows."""
    data = mapping(run.at("config.data"))
    mixed = [mapping(one) for one in sequence(data.get("train"))[:16]]
    values = [data.get("train_file"), data.get("dataset_name"), *(one.get("file") or one.get("name") for one in mixed)]
    files = [one for value in values for one in (sequence(value) or [value])]
    found = [name for one in files[:16] if (name := text(one))]
    held_out = text(data.get("eval_file"))
    return found + ([f"held out: {held_out}"] if held_out else [])


def metrics(run: Run) -> dict[str, float]:
    """Typical values by `tags.Metric.name`: medians after the warm-up; of losses, tokens and memory the last or the
    largest value. What is not recorded is absent; a loss that ends not finite is NaN."""
    found: dict[str, float | None] = {}
    for metric in tags.METRICS:
        if not metric.per_rank:
            found[metric.name] = run.typical(metric.name)
    found["hours"] = hours(run)
    for name in ("tokens_seen", "learning_rate", "eval_loss", "eval_perplexity", "eval_token_accuracy"):
        found[name] = run.series(name).last
    found |= {name: run.series(name).last for name in tags.BY_NAME if name.startswith("expert")}
    found["loss"] = _last_tenth(run.series("loss").values)
    evaluated = run.series("eval_loss").values
    found["eval_loss"] = float(evaluated[-1]) if len(evaluated) else None
    found["step_seconds"] = run.step_seconds
    found["fullest"] = memory.fullest(run)
    found["allocator_retries"] = memory.retries(run)
    found["gpu_utilization"] = speed.utilization(run)
    found["peak_of_rank"] = _largest(run, "peak_gib")
    found["reserved_of_rank"] = _largest(run, "reserved_gib")
    parts = bars(run).values()
    for phase in tags.PHASES:
        if known := [one[phase] for one in parts if phase in one]:
            found[phase] = fmean(known)
    return {name: value for name, value in found.items() if value is not None}


def _last_tenth(losses: np.ndarray) -> float | None:
    """The training loss of tables and legends; NaN if the last one is not finite."""
    if not len(losses):
        return None
    finite = losses[np.isfinite(losses)]
    return float(np.median(finite[-max(3, len(finite) // 10) :])) if math.isfinite(losses[-1]) else math.nan


def hours(run: Run) -> float | None:
    """Hours of training: the sum of all sessions of a resumed run, each of which counts from zero."""
    values = run.series("hours").finite().values
    if not len(values):
        return None
    ends = np.append(values[1:] < values[:-1], True)
    return float(values[ends].sum())


def _largest(run: Run, name: str) -> float | None:
    values = run.ranks.columns[name] if run.ranks is not None else np.empty(0)
    return float(np.nanmax(values)) if np.isfinite(values).any() else None


def bars(run: Run) -> dict[str, dict[str, float]]:
    """By rank, the seconds of each phase of a typical step.

    Medians do not add up: the phases are scaled so that their sum is the step time, which all ranks share.
    """
    found: dict[str, dict[str, float]] = {}
    for place, rank in enumerate(run.ranks.numbers if run.ranks is not None else []):
        medians = {name: finite_median(run.phase(name)[:, place]) for name in tags.PHASES}
        phases = {phase: median for phase, median in medians.items() if median is not None}
        total = sum(phases.values())
        scale = run.step_seconds / total if run.step_seconds and total > 0 else 1.0
        if phases:
            found[str(rank)] = {phase: seconds * scale for phase, seconds in phases.items()}
    return found


def curve(run: Run) -> dict[str, list[float | None]]:
    """The training loss, at most MOST_POINTS means: steps, tokens (empty if not recorded) and loss (null where it is
    not finite)."""
    series = run.series("loss")
    blocks = np.array_split(np.arange(len(series)), min(MOST_POINTS, max(len(series), 1)))
    blocks = [block for block in blocks if len(block)]
    steps = np.array([series.steps[block[-1]] for block in blocks], np.int64)
    loss = [float(series.values[block].mean()) for block in blocks]
    return {"tokens": tokens_at(run, steps), "steps": steps.tolist(), "loss": to_json_types(loss)}


def evaluations(run: Run) -> dict[str, list[float | None]]:
    """Steps, tokens and loss of the evaluations, the newest MOST_POINTS."""
    series = run.series("eval_loss")
    steps, loss = series.steps[-MOST_POINTS:], series.values[-MOST_POINTS:]
    return {"tokens": tokens_at(run, steps), "steps": steps.tolist(), "loss": to_json_types(loss.tolist())}


def tokens_at(run: Run, steps: np.ndarray) -> list[float | None]:
    """Tokens seen by the end of each step, between records by interpolation."""
    seen = run.series("tokens_seen").finite()
    if not len(seen) or not len(steps):
        return []
    known_steps, known = np.append(0, seen.steps), np.append(0.0, seen.values)
    return [round(float(one)) for one in np.interp(steps, known_steps, known)]


def ranks(run: Run) -> list[JsonObject]:
    """Per rank: host, device, and medians after the warm-up; null where not recorded. Times are those of `bars`."""
    if run.ranks is None:
        return []
    phases = bars(run)
    names = {"utilization": "gpu_utilization", "sm_clock_mhz": "gpu_sm_clock_mhz", "throttled": "gpu_throttled"}
    names |= {"power_w": "gpu_power_w", "temperature_c": "gpu_temperature_c"}
    found = []
    for place, rank in enumerate(run.ranks.numbers):
        one: JsonObject = {"rank": rank, **run.ranks.about[place]}
        own = phases.get(str(rank), {})
        step, waits = (sum(own.values()) if own else None), own.get("communication")
        one |= {"step": step, "communication": waits, "data_wait": own.get("data_wait")}
        one["own_work"] = (
            step - (waits or 0.0) if step is not None and (waits is not None or run.world_size == 1) else None
        )
        for name, column in names.items():
            one[name] = finite_median(run.ranks.column(column)[:, place])
        for name in ("peak_gib", "reserved_gib"):
            values = run.ranks.columns[name][:, place]
            one[name] = float(np.nanmax(values)) if np.isfinite(values).any() else None
        tokens = run.ranks.column("tokens")[:, place] / run.ranks.counts[run.ranks.typical()]  # of a step, not a record
        one["tokens"] = finite_median(tokens)
        one["reasons"] = [reason for reason, _ in run.ranks.reasons[place].most_common(4)]
        found.append(one)
    return found


def predicted(run: Run) -> list[JsonObject]:
    """What was predicted for the run and what it measured; empty without a prediction."""
    found = []
    for what in PREDICTED:
        one = mapping(run.at(f"prediction.{what}"))
        values = {name: number(one.get(name)) for name in ("predicted", "measured", "error")}
        if values["predicted"] is not None and values["measured"] is not None:
            found.append({"what": what, **values})
    return found


def charts(run: Run, finding: Finding) -> list[str]:
    """Tags of the run that show a finding, to pin them in TensorBoard."""
    found: list[str] = []
    for name in finding.charts:
        metric = tags.BY_NAME[name]
        wanted = [metric.of(n) for n in range(tags.SHOWN_RANKS)] if metric.per_rank else [metric.tag, *metric.also]
        found += [tag for tag in wanted if tag in run.scalars]
    return found[:MOST_TAGS]


# --- several runs ---------------------------------------------------------------------------------------------------


def comparison(reviewed: Sequence[Reviewed]) -> JsonObject:
    """Several runs side by side; empty for a single one."""
    if len(reviewed) < 2:
        return {}
    return {
        "runs": [one.name for one in reviewed],
        "configuration": differing_keys([one.run for one in reviewed]),
        "scaling": _scaling(reviewed),
        "at_equal_tokens": at_equal_tokens([one.run for one in reviewed]),
    }


def differing_keys(read: Sequence[Run]) -> list[JsonObject]:
    """Settings in which the runs differ: key and one value per run, None if not recorded; "null" is a setting."""
    all_settings = [settings(run) for run in read]
    keys = sorted(
        {key for one in all_settings for key in one} - {"training.output_dir", "training.overwrite_output_dir"}
    )
    rows = [{"key": key, "values": [one.get(key) for one in all_settings]} for key in keys]
    return [row for row in rows if len({repr(value) for value in row["values"]}) > 1]


def settings(run: Run) -> JsonObject:
    """Settings by dotted key, and what they were resolved to: world size, batch, backend, GPU."""
    found: JsonObject = {}
    for section, values in mapping(run.at("config")).items():
        flat = mapping(values) | mapping(mapping(values).get("extra"))
        found |= {text(f"{section}.{key}") or "?": _shown(value) for key, value in flat.items() if key != "extra"}
    for key, path in _RESOLVED.items():
        if run.at(path) is not None:
            found[key] = _shown(run.at(path))
    return found


_RESOLVED = {
    "world size": "world_size",
    "rows per device and pass": "batch.per_device",
    "accumulation": "batch.accumulation",
    "global batch size": "batch.global_batch_size",
    "backend": "backend",
    "dtype": "dtype",
    "hardware": "hardware.name",
}


def _shown(value: object) -> object:
    """A setting as a short value for a table."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return text(value)
    if isinstance(value, bool) or number(value) is not None:
        return value
    return text(str(to_json_types(value)))


def _scaling(reviewed: Sequence[Reviewed]) -> list[JsonObject]:
    """Speed-up and efficiency of each run that has a run of the same job on one device beside it."""
    names = {id(one.run): one.name for one in reviewed}
    rows = []
    for one in reviewed:
        if (found := scaling(one.run, [other.run for other in reviewed if other is not one])) is not None:
            rows.append({"run": one.name, "world_size": one.run.world_size, "against": names[id(found[0])]})
            rows[-1] |= {"efficiency": found[1], "speed_up": found[2]}
    return rows


def at_equal_tokens(read: Sequence[Run]) -> list[JsonObject]:
    """The training losses of the runs of each model after the same numbers of tokens; None for the other runs. Without
    runs that have no count of tokens, and without models of which there is one run."""
    curves = [_loss_by_tokens(run) for run in read]
    rows = []
    for model in dict.fromkeys(run.model_id for run in read):
        of_model = [one if run.model_id == model else None for run, one in zip(read, curves, strict=True)]
        ends = [float(one[0][-1]) for one in of_model if one is not None]
        if len(ends) < 2:
            continue
        for share in AT_TOKENS:
            at = share * min(ends)
            losses = [None if one is None else _smoothed(*one, at) for one in of_model]
            rows.append({"model_id": model, "tokens": round(at), "loss": losses})
    return rows


def _loss_by_tokens(run: Run) -> tuple[np.ndarray, np.ndarray] | None:
    series = run.series("loss").finite()
    tokens = tokens_at(run, series.steps)
    return (np.array(tokens, np.float64), series.values) if tokens else None


def _smoothed(tokens: np.ndarray, loss: np.ndarray, at: float) -> float | None:
    """Median of the twentieth of the losses before a number of tokens."""
    end = int(np.searchsorted(tokens, at, side="right"))
    before = loss[max(end - max(3, len(loss) // 20), 0) : end]
    return float(np.median(before)) if len(before) else None
