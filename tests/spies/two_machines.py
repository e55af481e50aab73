"""Train as if the ranks were on two machines: $MACHINES is the number of ranks of each, such as `1+3`.

Each machine has a host name of its own (node-0, node-1), and MACHINE in the arguments becomes its number. With
$KILL_STEP, all ranks of the second one end with SIGKILL after that step.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

from finetune.engine.checkpoint import output_folder
from tests.spies import train_with


def move_to_machine() -> int:
    """Set what a launcher on this rank's machine would; the machine's number."""
    first, second = map(int, os.environ["MACHINES"].split("+"))
    rank = int(os.environ["RANK"])
    machine = int(rank >= first)
    local, count = (rank - first, second) if machine else (rank, first)
    os.environ |= {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(count)}
    socket.gethostname = lambda: f"node-{machine}"
    sys.argv = [word.replace("MACHINE", str(machine)) for word in sys.argv]
    return machine


def kill_after_step(trainer: Any) -> None:
    """Put the end of the machine into a method of the trainer."""
    healthy, last = trainer.training_step, int(os.environ.get("KILL_STEP", -1))

    def training_step(*arguments: Any, **keywords: Any) -> Any:
        if trainer.state.global_step == last and MACHINE == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return healthy(*arguments, **keywords)

    trainer.training_step = training_step


if __name__ == "__main__":
    MACHINE = move_to_machine()
    output_folder.SHARED_SECONDS = 0.5  # a local disk shows a new file at once
    sys.exit(train_with(kill_after_step))
