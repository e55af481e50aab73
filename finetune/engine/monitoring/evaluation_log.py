"""Evaluations and answers on held-out rows: TensorBoard, run.json and the terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
from transformers import TrainerState

from finetune.engine.monitoring import tensorboard_pages
from finetune.engine.monitoring.progress import ProgressLines
from finetune.engine.monitoring.records import RecordWriter
from finetune.engine.monitoring.results import RunResults
from finetune.engine.monitoring.samples import SampleResult
from finetune.runtime.tags import tag

_EVALUATION = re.compile(r"eval_((?P<set>.+)_)?loss")


def evaluated_sets(logs: Mapping[str, object]) -> list[str]:
    """The held-out sets whose metrics are in a trainer's logs; "" is the only set of a run that has one."""
    found = (_EVALUATION.fullmatch(key) for key in logs)
    return [one["set"] or "" for one in found if one is not None]


class EvaluationLog:
    """Logs each evaluation once: a trainer may evaluate the same weights again, at the end of training for example."""

    def __init__(
        self, records: RecordWriter, results: RunResults, progress: ProgressLines | None, *, resumed: bool
    ) -> None:
        """
        Args:
            resumed: the run starts from a checkpoint, so the base model was evaluated by an earlier run.
        """
        self._records, self._results, self._progress, self._resumed = records, results, progress, resumed
        self._scored_at = -1  # step of the last answers to held-out prompts
        self._evaluated_at: dict[str, int] = {}  # step of the last evaluation of each set

    def metrics(
        self, logs: Mapping[str, float], name: str, losses: Sequence[float], state: TrainerState, *, shows: bool
    ) -> None:
        """The metrics of the held-out rows, or of the set `name` of several.

        Args:
            losses: of each document.
            shows: whether to print them, as during training.
        """
        step = state.global_step
        if step <= self._evaluated_at.get(name, -1) or (self._resumed and step == 0):
            return
        self._evaluated_at[name] = step
        prefix, label = (f"eval_{name}", f" ({name})") if name else ("eval", "")
        loss, accuracy = logs[f"{prefix}_loss"], logs.get(f"{prefix}_token_accuracy")
        self._results.evaluations.append({"step": step, "loss": loss} | ({"set": name} if name else {}))
        self._records.reported.clear()
        perplexity = math.exp(loss) if loss < 700 else math.inf
        values = {
            "eval_loss": loss,
            "eval_perplexity": perplexity,
            "eval_token_accuracy": accuracy,
            "eval_entropy": logs.get(f"{prefix}_entropy"),
        }
        for metric, value in values.items():
            if value is not None:
                self._records.evaluation(metric, float(value), step, prefix, label)
        finite = np.array(losses)
        finite = finite[np.isfinite(finite)]
        if self._records.events and finite.size:
            self._records.events.add_histogram(tag("eval_document_loss") + label, finite, step)
        if self._progress and shows:
            text = f"held-out loss{label} {loss:.4f}, perplexity {perplexity:.4g}"
            self._progress.line(state, text if accuracy is None else f"{text}, token accuracy {accuracy:.1%}")

    def scores(self, result: SampleResult, state: TrainerState, *, shows: bool) -> bool:
        """The scores of answers to held-out prompts. False if those of these weights are logged already."""
        step = state.global_step
        if step <= self._scored_at or (self._resumed and step == 0):
            return False
        self._scored_at = step
        count = len(result.answers)
        self._records.scalar("eval_exact_match", result.scores["exact_match"], step)
        self._records.scalar("eval_answers", count, step)
        for name, value in result.scores.items():
            if self._records.events and name != "exact_match":
                self._records.events.add_scalar(tag("eval_metric", label=name), value, step)
        evaluations = self._results.evaluations
        if evaluations and evaluations[-1]["step"] == step:
            evaluations[-1] |= {"answers": count, "scores": result.scores}
        if self._progress and shows:
            self._progress.line(state, f"held-out answers: {result.words}")
        return True

    def samples(self, result: SampleResult, step: int) -> None:
        """The text page of answers."""
        if self._records.events:
            page = tensorboard_pages.samples_page(result.shown, result.words)
            self._records.events.add_text("4 samples", page, step)
