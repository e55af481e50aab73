"""`python -m finetune.parity`: the same steps at several world sizes, compared."""
