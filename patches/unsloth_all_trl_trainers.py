"""When it is imported, Unsloth rewrites and compiles every trainer of TRL (GRPO, DPO, the experimental ones), not only
the one that is used.

Without this: the same training, but each start takes seconds longer. Applies to a GPU: on a CPU Unsloth rewrites none.
"""

import importlib.util
from pathlib import Path
from types import ModuleType

from patches import core

UPSTREAM = "https://github.com/unslothai/unsloth/blob/main/unsloth/models/rl.py"
REMOVE_WHEN = None  # when Unsloth rewrites a trainer at its first use; the probe then finds no function to replace

_MODULE, _ALL, _ONE = "unsloth.models.rl", "patch_trl_rl_trainers", "_patch_trl_rl_trainers"


def needed() -> bool:
    """Whether importing Unsloth would rewrite all trainers: its source has the function that does, and it is not going
    to be replaced. Does not import Unsloth."""
    import torch

    if not torch.cuda.is_available() or core.is_changed(_MODULE):
        return False
    unsloth = importlib.util.find_spec("unsloth")
    source = Path(str(unsloth.origin)).parent / "models" / "rl.py" if unsloth is not None else None
    if source is None or not source.is_file():
        return False
    text = source.read_text(encoding="utf-8")
    return f"\ndef {_ALL}():\n" in text and f"\ndef {_ONE}(" in text


def apply() -> None:
    """Rewrite TRL's SFT trainer alone, in place of all."""
    if needed():
        core.change_on_import({_MODULE: _rewrite_only_sft})


def _rewrite_only_sft(module: ModuleType) -> None:
    setattr(module, _ALL, lambda: getattr(module, _ONE)("sft_trainer"))
