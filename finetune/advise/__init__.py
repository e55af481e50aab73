"""`finetune advise`: choose the number of GPUs and the settings, from measurements on one device.

command.py is the command line, candidates.py measures, verdict.py decides, machine.py describes the hardware, launch.py
writes the launch files, report.py prints.
"""

from finetune.advise.command import main

__all__ = ["main"]
