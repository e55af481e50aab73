"""Checkpoints and the final model: written, verified, resumed and found again."""
