"""The trainer of the scripts that `benchmarks.drop_in_gpus` runs. It also writes what parity compares."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.processes import DUMP
from finetune import SFTTrainer as Ours
from finetune.engine.monitoring.callbacks import ParityDump

from transformers import SchedulerType  # isort: skip  # after the backend


class SFTTrainer(Ours):
    """Without clipping, which would hide a gradient that is wrong by a factor, and with a constant learning rate."""

    def __init__(self, *given: Any, args: Any, **named: Any) -> None:
        args.max_grad_norm, args.lr_scheduler_type, args.warmup_steps = 0.0, SchedulerType.CONSTANT, 0
        super().__init__(*given, args=args, **named)
        self.add_callback(ParityDump(Path(os.environ[DUMP])))
