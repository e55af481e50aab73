"""Unsloth checkpoints full fine-tuning in another way on several ranks than on one, and a slower one.

On one GPU its own reentrant checkpointing. On several torch's other one, for models with a picture or audio tower,
whose weights DDP would else count twice; and as full fine-tuning shares their code, for all models.
Without this: 7 % more time for each micro-batch (1.2 B on packs of 16,384 tokens, one H200; 0.19 GiB less memory).
With it those text models for which Unsloth itself keeps reentrant checkpointing under DDP with LoRA, as all their
layers are run once, keep it here too: what one GPU measures holds for several.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

UPSTREAM = "https://github.com/unslothai/unsloth/issues/3713"  # of the towers
REMOVE_WHEN = None  # unreleased: unsloth 2026.10.9 has it

MODULE = "unsloth.models.vision"
ASK, DECIDES = "vlm_gradient_checkpointing_reentrant", "is_distributed"
MODEL_TYPES = ("llama", "mistral", "gemma", "gemma2", "qwen2", "qwen3")  # unsloth.models.loader's own fast classes


def _loaded() -> ModuleType | None:
    """The module, where Unsloth is in use and asks whether there are several ranks."""
    module = sys.modules.get(MODULE)
    asked = sys.modules.get(getattr(getattr(module, ASK, None), "__module__", ""))
    found = hasattr(asked, DECIDES) and hasattr(getattr(module, "FastBaseModel", None), "post_patch_model")
    return module if found else None


def needed() -> bool:
    """Whether a text model on several ranks would be checkpointed as one with a tower. The same on any number of
    ranks, so that what one measures has the same patches as what several run."""
    module = _loaded()
    if module is None:
        return False
    ask = getattr(module, ASK)
    with _replaced(sys.modules[ask.__module__], DECIDES, lambda: True):
        towers = ask()
    return not towers and not hasattr(module.FastBaseModel.post_patch_model, "__wrapped__")


def apply() -> None:
    """Answer for the text models what is answered on one rank."""
    module = _loaded()
    if module is None or not needed():
        return
    original = module.FastBaseModel.post_patch_model

    @functools.wraps(original)
    def post_patch_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        if model.config.model_type not in MODEL_TYPES:
            return original(model, *args, **kwargs)
        with _replaced(module, ASK, lambda: True):
            return original(model, *args, **kwargs)

    module.FastBaseModel.post_patch_model = staticmethod(post_patch_model)


@contextmanager
def _replaced(module: ModuleType, name: str, function: Callable[[], bool]) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, original)
