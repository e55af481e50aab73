"""`python -m finetune.parity`: the same steps at several world sizes, compared."""

from finetune.parity.command import main as main
