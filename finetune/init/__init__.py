"""`finetune init`: a commented configuration from a few answers."""

from finetune.init.command import main, own_options

__all__ = ["main", "own_options"]
