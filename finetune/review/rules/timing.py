"""Shares of a step, each as one number per run: what the rules about speed compare with their thresholds."""

from __future__ import annotations

import numpy as np

from finetune.review.run import Run

FEW = 3  # records: fewer must show twice the threshold
CONSISTENT = 0.8  # share of the records in which the same rank must be behind


def shares(run: Run, phase: str) -> np.ndarray:
    """float64 [records, ranks]: a phase by the step of the same rank; without values not recorded."""
    part, step = run.phase(phase), run.phase("step")
    if not part.size or not step.size or len(part) != len(step):
        return np.empty((0, 0))
    with np.errstate(divide="ignore", invalid="ignore"):
        found = part / step
    found[~np.isfinite(found)] = np.nan
    return found[np.isfinite(found).any(axis=1)]


def data_wait(run: Run) -> float | None:
    """Median over records of the wait for rows of the lower median rank, by its step: what most ranks wait."""
    found = shares(run, "data_wait")
    return float(np.median(np.nanquantile(found, 0.5, axis=1, method="lower"))) if found.size else None


def exposed_communication(run: Run) -> float | None:
    """Median over records of the exposed communication, mean over ranks, by the step.

    Waiting for whichever rank is slower in a step is in it: see `least_communication`.
    """
    if run.world_size is None or run.world_size < 2:
        return None
    found = shares(run, "communication")
    return float(np.median(np.nanmean(found, axis=1))) if found.size else None


def least_communication(run: Run) -> float | None:
    """The same of the rank with the least in each record: the last one to arrive waits for no other."""
    found = shares(run, "communication")
    return float(np.median(np.nanmin(found, axis=1))) if found.size and found.shape[1] > 1 else None


def own_work_ratios(run: Run) -> np.ndarray:
    """float64 [records, ranks]: own work of a rank by the median of the others' in the same record."""
    own = run.phase("own_work")
    if own.ndim != 2 or own.shape[1] < 2:
        return np.empty((0, 0))
    own = own[np.isfinite(own).all(axis=1)]
    ratios = np.empty_like(own)
    for rank in range(own.shape[1]):
        others = np.median(np.delete(own, rank, axis=1), axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios[:, rank] = own[:, rank] / others
    ratios[~np.isfinite(ratios)] = 1.0
    return ratios


def consistent_ratio(ratios: np.ndarray) -> np.ndarray:
    """float64 [ranks]: the ratio that a rank reaches in at least CONSISTENT of the records."""
    needed = int(np.ceil(CONSISTENT * len(ratios) - 1e-9))
    return np.sort(ratios, axis=0)[::-1][needed - 1]


def records_of(run: Run, phase: str = "step") -> int:
    """Records behind a figure."""
    return len(run.phase(phase))


def limit(run: Run, threshold: float, phase: str = "step") -> float:
    """A threshold for this run: of fewer than FEW records, twice as much is needed to rule out chance."""
    return 2 * threshold if records_of(run, phase) < FEW else threshold


def evaluation_share(run: Run) -> float | None:
    """Evaluation and saving by the wall time of training, 0 to 1."""
    spent, whole = evaluation_seconds(run)
    return spent / whole if spent is not None and whole else None


def evaluation_seconds(run: Run) -> tuple[float | None, float]:
    """Seconds of evaluation and saving, and of training with both, since `session_start`."""
    parts = [run.number("evaluation_seconds"), run.number("saving_seconds")]
    whole = run.number("training_seconds")
    if whole and all(part is not None for part in parts):
        return sum(part or 0.0 for part in parts), whole
    if run.ranks is None:
        return None, 0.0
    spent = float(run.ranks.evaluation.sum() + run.ranks.saving.sum())
    return spent, spent + float(np.nansum(run.ranks.step_seconds))


def session_start(run: Run) -> int:
    """The step after which the times of run.json begin: a resumed run counts anew. ranks.jsonl has all sessions."""
    return run.resumed_at or 0 if run.number("training_seconds") else 0


def pauses(run: Run) -> int:
    """Evaluations while it trained, or records in which checkpoints were written, whichever were more: since
    `session_start`."""
    start = session_start(run)
    evaluations = len(run.series("eval_loss").after(start))
    saved = int((run.ranks.saving[run.ranks.steps > start] > 0).sum()) if run.ranks is not None else 0
    return max(evaluations, saved)
