"""`finetune bench`: what this machine can do, measured by one protocol (finetune/statistics.py)."""

from finetune.bench.verb import main

__all__ = ["main"]
