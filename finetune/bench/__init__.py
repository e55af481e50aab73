"""`finetune bench`: measurements of this machine, all by one protocol (finetune/measure/protocol.py)."""

from finetune.bench.command import main

__all__ = ["main"]
