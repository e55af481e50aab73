"""FlashAttention-4 behind torch's attention over packed documents: no other module needs to know which kernel runs.

`torch.nn.attention.varlen.varlen_attn` is what Unsloth and the transformers backend call for packs on a GPU.
`install_switch` replaces it with a switch, which `finetune.engine.kernels.attention` sets after it has compared the two
kernels. torch has a registry for such kernels; that of torch 2.11 does not fit flash-attn 4.0 (another number of
results).
"""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.runtime.files import cache_folder, private_folder

if TYPE_CHECKING:
    from torch import Tensor

PACKAGE = "flash-attn-4"
NOT_INSTALLED = f"{PACKAGE} is not installed: pip install 'finetune-multigpu[flash]'"
CAUSAL = (-1, 0)  # the window of plain causal attention
# Tokens. The kernels only need an upper bound on the longest document. If that is a single block (at most 128 tokens),
# other kernels are compiled, in the middle of a run: 5.7 s on an H200 (benchmarks/results/LOG.md).
SHORTEST_BOUND = 512
# Documents of one call. With more than these, flash-attn 4.0 runs and compiles further kernels: 7.9 s on an H200.
MANY_DOCUMENTS = 256
_enabled = _paused = _has_run = False


def why_unusable() -> str | None:
    """Why FlashAttention-4 cannot be tried on this process's GPU; None if it can."""
    import torch

    try:
        found = importlib.util.find_spec("flash_attn.cute")
    except ImportError:
        found = None
    if found is None:
        return NOT_INSTALLED
    if not torch.cuda.is_available():
        return "there is no GPU"
    return "it needs Hopper (H100) or newer" if torch.cuda.get_device_capability()[0] < 9 else None


def install_switch() -> None:
    """Put the switch in front of torch's kernel, before Unsloth is imported, which keeps the function that it finds."""
    if why_unusable() is not None:
        return
    from torch.nn.attention import varlen

    if not hasattr(varlen.varlen_attn, "is_switch"):
        varlen.varlen_attn = switch(varlen.varlen_attn)
    # Unsloth, with torch 2.12 and newer, would call the operator below this function.
    os.environ.setdefault("UNSLOTH_LEAN_VARLEN", "0")


def is_switch_installed() -> bool:
    """Whether `set_enabled` has an effect in this process."""
    from torch.nn.attention import varlen

    return hasattr(varlen.varlen_attn, "is_switch")


def is_enabled() -> bool:
    """Whether FlashAttention-4 is in use. Unsloth then needs documents of unequal lengths: it computes documents of
    equal lengths as rows of a batch, with SDPA."""
    return _enabled


def set_enabled(on: bool) -> None:
    """Compute with FlashAttention-4 from now on, or with torch's kernel."""
    global _enabled, _has_run
    _enabled, _has_run = on, False


def pause(on: bool) -> None:
    """Compute with torch's kernel meanwhile: an operator of torch, which selective checkpointing can see."""
    global _paused
    _paused = on


def is_paused() -> bool:
    """Whether torch's kernel computes, whatever `set_enabled` says."""
    return _paused


def has_run() -> bool:
    """Whether FlashAttention-4 has computed anything since `set_enabled`."""
    return _has_run


def mark_run() -> None:
    """FlashAttention-4 has computed something."""
    global _has_run
    _has_run = True


def switch(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the interface of `torchs` that calls FlashAttention-4 while that is in use, where it computes the
    same: causal attention without a window, of which only the output is asked for."""

    @functools.wraps(torchs)
    def varlen_attn(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        **options: Any,
    ) -> Any:
        others = set(options) - {"scale", "window_size", "enable_gqa"}
        same = tuple(options.get("window_size", (-1, -1))) == CAUSAL and not any(options[name] for name in others)
        if not (_enabled and not _paused and same and cu_seq_k is not None):
            return torchs(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options)
        output = kernel()(
            query,
            key,
            value,
            cu_seqlens_q=cu_seq_q,
            cu_seqlens_k=cu_seq_k,
            max_seqlen_q=max(max_q, SHORTEST_BOUND),
            max_seqlen_k=max(max_k, SHORTEST_BOUND),
            softmax_scale=options.get("scale"),
            causal=True,
        )[0]
        mark_run()
        return output

    varlen_attn.is_switch = True  # type: ignore[attr-defined]
    return varlen_attn


@functools.cache
def kernel() -> Callable[..., Any]:
    """FlashAttention-4; returns (output, logsumexp). Its compiled kernels are kept for later starts and other ranks."""
    folder = private_folder(cache_folder() / "flash_attention_4" / platform.machine())
    if folder is not None and _can_lock(folder):  # the variables are read when the package is imported
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))
    from flash_attn.cute.interface import flash_attn_varlen_func  # type: ignore[reportMissingImports]

    return flash_attn_varlen_func


def _can_lock(folder: Path) -> bool:
    """Whether files of `folder` can be locked, as the package does for each kernel; some network disks cannot, and the
    package would then end the run."""
    try:
        with (folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
