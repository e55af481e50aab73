"""Unsloth tries an attention kernel, backward and all, in the middle of a layer that is being checkpointed.

Where all weights are trained on packs, Unsloth compiles each decoder layer and, while it is traced, runs
`_varlen_in_graph_probe`: a forward and a backward of that kernel on zeros. On several ranks checkpointing is the kind
that is not reentrant, which takes what any forward inside the layer saves: the trial's backward asks for it, and so has
the layer computed again, on autograd's thread, which waits for the compiler, which waits for the trial.
Without this: full fine-tuning on packs with gradient checkpointing hangs in its first step on two GPUs, without an
error. With it the trial keeps what it saves to itself.
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
    """The module, if Unsloth is in use and has the trial. Without a GPU Unsloth does not load it; loading it, and half
    of Unsloth with it, would take as long as the rest of the startup."""
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


def _same(tensor: Any) -> Any:
    return tensor


def needed() -> bool:
    """Whether hooks such as those of checkpointing see what the trial saves. Without a GPU it saves nothing."""
    module = _loaded()
    if module is None:
        return False
    import torch

    seen = []

    def note(tensor: Any) -> Any:
        seen.append(True)
        return tensor

    device = torch.cuda.current_device() if torch.cuda.is_available() else 0
    with torch.autograd.graph.saved_tensors_hooks(note, _same):
        getattr(module, NAME)(device, torch.bfloat16, HEAD_WIDTH, HEADS, HEADS, None)
    return bool(seen)


def apply() -> None:
    """Run the trial under hooks that do nothing: only the innermost hooks in effect are called."""
    module = _loaded()
    if module is None or not needed():
        return
    import torch

    original = getattr(module, NAME)

    @functools.wraps(original)
    def alone(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(_same, _same):
            return original(*args, **kwargs)

    setattr(module, NAME, alone)
