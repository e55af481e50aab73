"""What TensorBoard shows of a run besides the curves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune import review
from finetune.run.evaluation import answer_and_score

if TYPE_CHECKING:
    from finetune.engine.job import Job
    from finetune.engine.monitoring.run_logger import Dashboard
    from finetune.engine.monitoring.samples import Question


def dashboard_pages(job: Job, questions: list[Question]) -> Dashboard:
    """The pages of TensorBoard."""
    from finetune.engine.job import layout_facts
    from finetune.engine.monitoring import tensorboard_pages
    from finetune.engine.monitoring.run_logger import Dashboard

    include_rows = job.config.logging.include_rows
    page = tensorboard_pages.data_page(job.data.ledgers, layout_facts(job), include_rows=include_rows)
    return Dashboard(
        texts={"1 data": page},
        divergence=review.divergence if job.config.training.stop_on_divergence else None,
        samples=(lambda: answer_and_score(job, questions)) if questions else None,
        include_rows=include_rows,
    )
