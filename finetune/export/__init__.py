"""`finetune export`: a run as an adapter, a merged model, a GGUF file or a repository on the Hub."""

from finetune.export.command import main

__all__ = ["main"]
