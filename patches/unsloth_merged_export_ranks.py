"""Unsloth's merged, GGUF and quantized exports do not check which rank they run on.

`save_pretrained_merged`, `save_pretrained_gguf`, their push_to_hub_ variants and the functions behind them default to
`is_main_process=True` and check nothing else, on GPUs and on a CPU. transformers 5 saves the weights of a model without
adapters on rank 0 only, but this does not cover merged weights, adapters, tokenizers and GGUF files.
Without this: all ranks merge the whole model at the same time (memory times world size) and write the same files, which
may be corrupted, or push them to the Hub once per rank.

With this, rank 0 exports and the other ranks return None immediately. They do not wait, because an export may outlast
the timeout of the process group, and because in scripts that export on rank 0 only, as many do, rank 0 would wait
forever in a collective. Callers whose other ranks need the files must wait for rank 0 themselves. A model that is
sharded over ranks (FSDP2, ZeRO-3) is exported on all ranks: Unsloth gathers it there and writes once.
"""

import contextvars
import functools
import sys
import tempfile
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

UPSTREAM = "https://github.com/unslothai/unsloth/issues/2435"
REMOVE_WHEN = None  # unreleased: unsloth 2026.10.9 and unsloth_zoo 2026.10.9 have it

EXPORTS = {
    "unsloth.save": (
        "unsloth_save_model",
        "unsloth_generic_save",
        "unsloth_save_pretrained_merged",
        "unsloth_push_to_hub_merged",
        "unsloth_generic_save_pretrained_merged",
        "unsloth_generic_push_to_hub_merged",
        "unsloth_save_pretrained_gguf",
        "unsloth_push_to_hub_gguf",
        "unsloth_save_pretrained_torchao",
        "unsloth_save_pretrained_openvino",
        "unsloth_push_to_hub_openvino",
        "unsloth_convert_lora_to_ggml_and_save_locally",
        "unsloth_convert_lora_to_ggml_and_push_to_hub",
    ),
    "unsloth_zoo.cpu.loader": ("save_pretrained_merged", "save_pretrained_gguf", "push_to_hub_merged"),
}
# Functions that are cheap to probe, because they access the model before anything else.
PROBED = {
    "unsloth.save": ("unsloth_generic_save_pretrained_merged", "unsloth_save_pretrained_gguf"),
    "unsloth_zoo.cpu.loader": ("save_pretrained_merged",),
}

# Exports call each other; only the outermost one checks the rank.
_decided = contextvars.ContextVar("export_decided", default=False)


def _loaded(names: dict[str, tuple[str, ...]]) -> list[Callable]:
    """The functions with these names in modules that `import unsloth` has loaded."""
    modules = [(sys.modules.get(module), functions) for module, functions in names.items()]
    return [vars(module)[name] for module, functions in modules if module for name in functions if name in vars(module)]


def needed() -> bool:
    """Whether an export starts to work on rank 1 of 2."""
    return any(_works_on_rank_1(export) for export in _loaded(PROBED))


def _works_on_rank_1(export: Callable) -> bool:
    import torch

    if not torch.distributed.is_available():
        return False

    class Model(torch.nn.Module):
        """An empty model that fails as soon as an export uses it."""

        def fail(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("the export has started")

        config = dtype = property(fail)
        save_pretrained = state_dict = fail

    second = dict(is_initialized=lambda: True, get_rank=lambda *_: 1, get_world_size=lambda *_: 2)
    collectives = dict.fromkeys(("barrier", "broadcast_object_list"), lambda *_, **__: None)
    with mock.patch.multiple(torch.distributed, **second, **collectives), tempfile.TemporaryDirectory() as folder:
        try:
            export(Model(), folder, tokenizer=object())
        except Exception:  # whatever failed, the export did not leave the work to rank 0
            return True
    return False


def apply() -> None:
    """Check the rank before every export, in every module of Unsloth that refers to it."""
    if not needed():
        return
    holders = [
        module for name, module in list(sys.modules.items()) if name.partition(".")[0] in ("unsloth", "unsloth_zoo")
    ]
    for export in _loaded(EXPORTS):
        guarded = _on_rank_0(export)
        for holder in filter(None, holders):
            _rebind(holder, export, guarded)


def _rebind(holder: ModuleType, export: Callable, guarded: Callable) -> None:
    for name in [name for name, value in vars(holder).items() if value is export]:
        setattr(holder, name, guarded)


def _on_rank_0(export: Callable) -> Callable:
    @functools.wraps(export)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        model = args[0] if args else kwargs.get("model", kwargs.get("self"))
        if not _decided.get() and _left_to_rank_0(model):
            return None
        token = _decided.set(True)
        try:
            return export(*args, **kwargs)
        finally:
            _decided.reset(token)

    return guarded


def _left_to_rank_0(model: Any) -> bool:
    import torch

    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_rank() == 0:
        return False
    from torch.distributed.tensor import DTensor

    sharded = any(isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters())
    return not sharded
