"""A command that starts ranks itself, on a warm process: they are forked from the same one.

python -m tests.helpers.warm_command MODULE ARGUMENT ..., for `tests.helpers.launch.command_with_ranks`.
"""

from __future__ import annotations

import runpy
import sys

from finetune.bench import launch
from finetune.runtime import subprocesses
from tests.helpers import warm

if __name__ == "__main__":
    subprocesses.run, launch._follow = warm.run_command, warm.follow
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
