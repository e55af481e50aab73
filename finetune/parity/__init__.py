"""`python -m finetune.parity`: compare the same steps on several world sizes."""

from finetune.parity.command import main as main
