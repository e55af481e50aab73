"""Unsloth offloads the frozen copy of a trained embedding or head from the GPU to a pickle in the model's folder.

If `embed_tokens` or `lm_head` is in `modules_to_save` or `target_modules` and Unsloth's own checkpointing is used,
`get_peft_model` saves the weights that PEFT is about to copy to TEMPORARY/NAME_OR_PATH/*.pt, which for a local model is
the model's own folder, and maps them back into memory on the CPU.
Without this: every rank writes the same file while other ranks have it mapped; a read-only folder ends the run; and
DDP, which requires a single device type, gets weights on two (refused by the invariant *one device per rank*). With
this, the copy stays on the GPU, at the cost of one embedding's memory per GPU.
"""

import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

UPSTREAM = "https://github.com/unslothai/unsloth/issues/1606"
REMOVE_WHEN = None  # unreleased: unsloth 2026.10.9 has it

MODULE = "unsloth.models.llama"  # its get_peft_model is the only caller
NAMES = ("offload_input_embeddings", "offload_output_embeddings")


def _loaded() -> tuple[ModuleType | None, dict[str, Callable[..., Any]]]:
    """The module and its functions among NAMES; (None, {}) if `import unsloth` has not loaded it, as on a CPU."""
    module = sys.modules.get(MODULE)
    return module, {name: vars(module)[name] for name in NAMES if module is not None and name in vars(module)}


def needed() -> bool:
    """Whether the functions write a file or replace the layers, tried on a model of two small layers."""
    _, functions = _loaded()
    if not functions:
        return False
    import torch

    with tempfile.TemporaryDirectory(prefix="patch-") as folder:
        model = _Layers(torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3, bias=False), Path(folder) / "model")
        before = model.layers()
        for function in functions.values():
            function(model, folder)
        return model.layers() != before or any(Path(folder).rglob("*.pt"))


class _Layers:
    """A stand-in for a model, with the members that the functions use."""

    def __init__(self, first: Any, last: Any, folder: Path) -> None:
        self._first, self._last = first, last
        self.config = SimpleNamespace(_name_or_path=str(folder))

    def layers(self) -> tuple[Any, Any]:
        return self._first, self._last

    def get_input_embeddings(self) -> Any:
        return self._first

    def get_output_embeddings(self) -> Any:
        return self._last

    def set_input_embeddings(self, layer: Any) -> None:
        self._first = layer

    def set_output_embeddings(self, layer: Any) -> None:
        self._last = layer


def apply() -> None:
    """Make the functions do nothing, so that the layers stay on the GPU."""
    module, functions = _loaded()
    if module is None or not needed():
        return
    for name, original in functions.items():
        setattr(module, name, _no_op(original))


def _no_op(original: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(original)
    def no_op(*args: Any, **kwargs: Any) -> None:
        return None

    return no_op
