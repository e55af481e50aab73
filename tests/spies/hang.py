"""Get stuck on rank $STUCK_RANK when $STUCK_STEP steps are complete. $STUCK is `stop` (SIGSTOP), `loader` (never gets
its rows) or `save` (writes its checkpoint only after the report is there)."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from finetune.runtime.ranks import distributed
from tests.spies import train_with

AT = {"stop": "training_step", "loader": "collate_rows", "save": "_save_optimizer_and_scheduler"}


def get_stuck(trainer: Any) -> None:
    """Put the fault into a method of one rank's trainer."""
    kind, rank, step = os.environ["STUCK"], int(os.environ["STUCK_RANK"]), int(os.environ["STUCK_STEP"])
    if distributed.ranks().rank != rank:
        return
    healthy, report = getattr(trainer, AT[kind]), Path(trainer.args.output_dir, "hang", "report.json")

    def method(*arguments: Any, **keywords: Any) -> Any:
        if trainer.state.global_step == step:
            if kind == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            while kind == "loader" or not report.exists():
                threading.Event().wait(0.05)
        return healthy(*arguments, **keywords)

    setattr(trainer, AT[kind], method)


if __name__ == "__main__":
    sys.exit(train_with(get_stuck))
