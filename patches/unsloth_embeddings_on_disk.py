"""Unsloth moves the frozen copy of a trained embedding or head off the GPU, through a pickle in the model's folder.

With `modules_to_save` or target_modules of `embed_tokens` or `lm_head` and Unsloth's own checkpointing,
`get_peft_model` saves the weights that PEFT is about to copy as TEMPORARY/NAME_OR_PATH/*.pt, which for a local model is
that model's own folder, and reads them back as a memory map on the CPU.
Without this: every rank writes the same file while others have it mapped; a folder that cannot be written ends the
run; and DDP, which requires one kind of device, gets weights on two (this program's *one device per rank* refuses
that). With it the copy stays where it is, for the memory of one embedding on each GPU.
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
    """The module, and those of the functions that it has; nothing if `import unsloth` has not loaded it (on a CPU)."""
    module = sys.modules.get(MODULE)
    return module, {name: vars(module)[name] for name in NAMES if module is not None and name in vars(module)}


def needed() -> bool:
    """Whether a model of two small layers leaves a file on disk, or changes the layers."""
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
    """The parts of a model that the functions use."""

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
    """Leave the layers alone."""
    module, functions = _loaded()
    if module is None or not needed():
        return
    for name, original in functions.items():
        setattr(module, name, _stays(original))


def _stays(original: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(original)
    def stay(*args: Any, **kwargs: Any) -> None:
        return None

    return stay
