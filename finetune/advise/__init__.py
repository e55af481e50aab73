"""`finetune advise`: how many GPUs, and with which settings? Measured on one device, predicted for several, decided.

command.py is the command; candidates.py measures, verdict.py decides, machine.py and launch.py know the hardware and
how to start a run on it, report.py prints.
"""

from finetune.advise.command import main

__all__ = ["main"]
