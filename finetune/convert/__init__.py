"""`finetune convert`: turn an Unsloth notebook into a script that is safe on N ranks, or refuse it with the reason."""

from finetune.convert.command import main

__all__ = ["main"]
