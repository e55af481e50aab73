"""Unsloth tests an attention kernel, including its backward pass, inside a layer that is being checkpointed.

For full fine-tuning on packs, Unsloth compiles each decoder layer and, during tracing, runs `_varlen_in_graph_probe`: a
forward and a backward pass of that kernel on zeros. On several ranks checkpointing is non-reentrant and intercepts all
tensors saved inside the layer. When the test's backward pass asks for its tensors, checkpointing recomputes the layer
on autograd's thread, which waits for the compiler, which waits for the test.
Without this: full fine-tuning on packs with gradient checkpointing hangs in its first step on two GPUs, without an
error. With this, checkpointing does not see the tensors that the test saves.
"""

import functools
import importlib
import sys
from types import ModuleType
from typing import Any

UPSTREAM = "https://github.com/unslothai/unsloth/blob/main/unsloth/utils/hf_packed_attention.py"
REMOVE_WHEN = None  # unreleased: unsloth 2026.10.9 has it

MODULE = "unsloth.utils.hf_packed_attention"
NAME = "_varlen_in_graph_probe"
HEAD_WIDTH, HEADS = 64, 2  # any that the kernel accepts


def _loaded() -> ModuleType | None:
    """The module, if Unsloth is in use and contains the test. Unsloth does not load it without a GPU, and neither does
    this function: loading it, and half of Unsloth with it, takes as long as the rest of the startup."""
    if "unsloth" not in sys.modules:
        return None
    import torch

    if MODULE not in sys.modules and not torch.cuda.is_available():
        return None
    try:
        module = importlib.import_module(MODULE)
    except ImportError:  # a release without compiled layers
        return None
    return module if hasattr(module, NAME) else None


def _identity(tensor: Any) -> Any:
    return tensor


def needed() -> bool:
    """Whether saved-tensor hooks, as checkpointing uses them, see the test's tensors. Without a GPU it saves none."""
    module = _loaded()
    if module is None:
        return False
    import torch

    seen = []

    def note(tensor: Any) -> Any:
        seen.append(True)
        return tensor

    device = torch.cuda.current_device() if torch.cuda.is_available() else 0
    with torch.autograd.graph.saved_tensors_hooks(note, _identity):
        getattr(module, NAME)(device, torch.bfloat16, HEAD_WIDTH, HEADS, HEADS, None)
    return bool(seen)


def apply() -> None:
    """Run the test under hooks that do nothing: of nested hooks, only the innermost ones are called."""
    module = _loaded()
    if module is None or not needed():
        return
    import torch

    original = getattr(module, NAME)

    @functools.wraps(original)
    def isolated(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(_identity, _identity):
            return original(*args, **kwargs)

    setattr(module, NAME, isolated)
