"""Unsloth uses a slower kind of gradient checkpointing for full fine-tuning on several ranks than on one.

On one GPU it uses its own reentrant checkpointing, under DDP torch's non-reentrant one, because DDP would mark the
weights of a vision or audio tower ready twice. Full fine-tuning shares that code, so text models are affected as well.
Without this: 7% more time per micro-batch (1.2 B, packs of 16,384 tokens, one H200) and 0.19 GiB less memory. With
this, text models keep reentrant checkpointing, which Unsloth itself uses for them under DDP with LoRA: each of their
layers runs once per forward pass. Measurements on one GPU then apply to several.
"""

import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

UPSTREAM = "https://github.com/unslothai/unsloth/issues/3713"  # the error that non-reentrant checkpointing avoids
REMOVE_WHEN = None  # unreleased: 2026.8.22 to 2026.10.9 have it (benchmarks/release_probes.py)

MODULE = "unsloth.models.vision"
UTILITIES = "unsloth.models.loader_utils"
# The function that `post_patch_model` calls to decide, with its result on one rank. Releases up to 2026.10.7 call the
# second one.
DECIDERS = {"vlm_gradient_checkpointing_reentrant": True, "is_distributed": False}
# It calls one of these two as soon as it has decided; the first if checkpointing is non-reentrant.
DROPS_REENTRANT, PREPARES = "unpatch_unsloth_gradient_checkpointing", "prepare_model_for_training"
MODEL_TYPES = ("llama", "mistral", "gemma", "gemma2", "qwen2", "qwen3")  # the fast classes of unsloth.models.loader


def _loaded() -> ModuleType | None:
    """The module, if `import unsloth` has loaded it and it decides in one of the known ways."""
    module = sys.modules.get(MODULE)
    known = module is not None and hasattr(getattr(module, "FastBaseModel", None), "post_patch_model")
    return module if known and _decider(module) and hasattr(module, PREPARES) else None


def _decider(module: ModuleType | None) -> str | None:
    return next((name for name in DECIDERS if hasattr(module, name)), None)


def needed() -> bool:
    """Whether a Llama on two ranks would get non-reentrant checkpointing. The result does not depend on the actual
    world size, so that a measurement on one rank uses the same patches as a run on several."""
    module = _loaded()
    return module is not None and not _reentrant_on_two_ranks(module)


class _Decided(Exception):
    """Exits `post_patch_model` as soon as it has decided, before it changes anything."""

    def __init__(self, reentrant: bool) -> None:
        self.reentrant = reentrant


def _reentrant_on_two_ranks(module: ModuleType) -> bool:
    import torch

    def drops_reentrant(*_: Any, **__: Any) -> None:
        raise _Decided(False)

    def prepares(*_: Any, use_reentrant: bool = True, **__: Any) -> None:
        raise _Decided(use_reentrant)

    model = torch.nn.Module()
    model.config = SimpleNamespace(model_type="llama", dtype=torch.bfloat16, torch_dtype=torch.bfloat16)  # type: ignore
    with ExitStack() as replaced:
        for holder in (module, sys.modules.get(UTILITIES)):
            if holder is not None and hasattr(holder, "is_distributed"):
                replaced.enter_context(_replaced(holder, "is_distributed", lambda: True))
        if hasattr(module, DROPS_REENTRANT):
            replaced.enter_context(_replaced(module, DROPS_REENTRANT, drops_reentrant))
        replaced.enter_context(_replaced(module, PREPARES, prepares))
        try:
            module.FastBaseModel.post_patch_model(model, True)
        except _Decided as decision:
            return decision.reentrant
    raise RuntimeError("unsloth's post_patch_model no longer prepares a model for training")


def apply() -> None:
    """Have `post_patch_model` decide for text models as it does on one rank."""
    module = _loaded()
    decider = _decider(module)
    if module is None or decider is None or not needed():
        return
    original = module.FastBaseModel.post_patch_model

    @functools.wraps(original)
    def post_patch_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        if model.config.model_type not in MODEL_TYPES:
            return original(model, *args, **kwargs)
        with _replaced(module, decider, lambda: DECIDERS[decider]):
            return original(model, *args, **kwargs)

    module.FastBaseModel.post_patch_model = staticmethod(post_patch_model)


@contextmanager
def _replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)
