"""`finetune bench`: what this machine can do, measured by one protocol (measure/protocol.py)."""

from finetune.bench.command import main

__all__ = ["main"]
