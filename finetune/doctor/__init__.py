"""`python -m finetune.doctor`: a report on this machine for a bug report."""

from finetune.doctor.command import answer as answer
from finetune.doctor.command import main as main
