"""When it is imported, Unsloth rewrites and compiles every trainer of TRL (GRPO, DPO, the experimental ones), not only
the one that is used.

Without this: the same training, but each start takes seconds longer. Applies to a GPU: on a CPU Unsloth rewrites none.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path

UPSTREAM = "https://github.com/unslothai/unsloth/blob/main/unsloth/models/rl.py"
REMOVE_WHEN = None  # when Unsloth rewrites a trainer at its first use; the probe then finds no function to replace

_MODULE, _ALL, _ONE = "unsloth.models.rl", "patch_trl_rl_trainers", "_patch_trl_rl_trainers"


def needed() -> bool:
    """Whether importing Unsloth would rewrite all trainers: its source has the function that does, and it is not going
    to be replaced. Does not import Unsloth."""
    import torch

    if not torch.cuda.is_available() or any(isinstance(finder, _OnlySft) for finder in sys.meta_path):
        return False
    unsloth = importlib.util.find_spec("unsloth")
    source = Path(str(unsloth.origin)).parent / "models" / "rl.py" if unsloth is not None else None
    if source is None or not source.is_file():
        return False
    text = source.read_text(encoding="utf-8")
    return f"\ndef {_ALL}():\n" in text and f"\ndef {_ONE}(" in text


def apply() -> None:
    """Rewrite TRL's SFT trainer alone, in place of all."""
    if not needed():
        return
    sys.meta_path.insert(0, _OnlySft())


class _OnlySft(importlib.abc.MetaPathFinder):
    """Replaces one function of the module when that has been executed, before anything calls it."""

    def find_spec(self, fullname, path, target=None):
        if fullname != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            setattr(module, _ALL, lambda: getattr(module, _ONE)("sft_trainer"))

        spec.loader.exec_module = exec_module
        return spec
