"""`finetune convert`: an Unsloth notebook becomes a script that is safe on N ranks, or is refused with the reason."""

from finetune.convert.command import main

__all__ = ["main"]
