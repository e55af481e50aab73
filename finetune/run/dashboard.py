"""What TensorBoard shows of a run besides the curves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from finetune import review
from finetune.engine.record import RunRecord
from finetune.engine.session.opening import total_steps
from finetune.redact import redact_tree
from finetune.run.evaluation import answer_and_score

if TYPE_CHECKING:
    from finetune.engine.job import Job
    from finetune.engine.monitoring.run_logger import Dashboard
    from finetune.engine.monitoring.samples import Question


def dashboard_pages(job: Job, record: RunRecord, questions: list[Question]) -> Dashboard:
    """The pages of TensorBoard.

    Args:
        record: run.json, as far as it is known when training begins.
    """
    from finetune.engine.job import layout_facts
    from finetune.engine.monitoring import tensorboard_pages
    from finetune.engine.monitoring.run_logger import Dashboard

    config, known = job.config, redact_tree(record.content)
    facts = ("backend", "backend_reason", "dtype", "world_size", "batch", "learning_rate", "hardware", "versions")
    run = {name: known[name] for name in facts}
    run["patches"] = {one["name"]: one["reason"] for one in known["patches"] if one.get("applied")}
    run["invariants"] = known.get("invariants")
    if config.logging.profile_steps:
        run["traces"] = str(Path("runs", "trace-rank-N.json"))
    given = {name: value for name, value in tensorboard_pages.flatten(known["config"]) if name in config.given}
    resolved = {
        "training.learning_rate": known["learning_rate"],
        "lora.r": 0 if config.model.full_finetuning else config.lora.r,
        "training.global_batch_size": job.batch.global_batch_size,
        "training.num_train_epochs": total_steps(job) / job.plan().steps_per_epoch,
        "world_size": known["world_size"],
        "device": job.hardware.name,
        "backend": job.stack.backend,
    }
    return Dashboard(
        texts={
            "1 data": tensorboard_pages.data_page(
                job.data.ledgers, layout_facts(job), include_rows=config.logging.include_rows
            ),
            "2 run": tensorboard_pages.facts_page(run),
        },
        hyperparameters=given | resolved,
        divergence=review.divergence if config.training.stop_on_divergence else None,
        samples=(lambda: answer_and_score(job, questions)) if questions else None,
        include_rows=config.logging.include_rows,
    )
