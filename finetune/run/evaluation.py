"""The model's loss on held-out rows, and its answers with their scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.engine.session.building import BuiltTrainer
from finetune.runtime.types import JsonObject

if TYPE_CHECKING:
    from finetune.engine.job import Job
    from finetune.engine.monitoring.samples import Question, SampleResult


def evaluate(job: Job, built: BuiltTrainer, questions: list[Question]) -> tuple[JsonObject, SampleResult | None]:
    """Loss and scores of the current model on the held-out rows, for run.json, and its answers to `questions`."""
    loss = built.trainer.evaluate()["eval_loss"] if job.data.eval else None
    if not questions:
        return {"eval_loss": loss, "exact_match": None}, None
    result = answer_and_score(job, questions)
    built.logger.log_scores(result, built.trainer.state)
    scores = dict(result.scores)
    found = {"eval_loss": loss, "exact_match": scores.pop("exact_match"), "broken_answers": result.broken}
    return found | ({"metric": scores} if scores else {}), result


def answer_and_score(job: Job, questions: list[Question]) -> SampleResult:
    """The current model's answers to held-out prompts, with their scores. Every rank calls it."""
    from finetune.engine.monitoring import samples

    metric = next(
        (samples.Metric(name=name, function=one) for key, name, one in job.user_code if "metric" in key), None
    )
    return samples.answer_and_score(job.model, job.tokenizer, questions, metric)
