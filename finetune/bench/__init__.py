"""`finetune bench comm`: communication between ranks, measured by the protocol of finetune/measure/protocol.py."""

from finetune.bench.command import main

__all__ = ["main"]
