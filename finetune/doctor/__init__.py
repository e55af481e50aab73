"""`finetune doctor`: a report on this machine and what would stop a run, for bug reports."""

from finetune.doctor.command import main
from finetune.doctor.inspect import answer

__all__ = ["answer", "main"]
