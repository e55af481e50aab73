"""A run: its model, its trainer, its checkpoints and its record."""
