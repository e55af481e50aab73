"""torch 2.11's variable-length flash attention supports grouped-query attention but does not accept `enable_gqa`.

Unsloth 2026.10 checks `torch.nn.attention.varlen.varlen_attn` for that keyword and, if it is missing, makes one
attention call per document and layer instead. Affects CUDA only; a CPU uses neither path.
Without this: packed training on torch 2.11 has half the throughput, with the same losses and no warning.
"""

import functools
import inspect

UPSTREAM = "https://github.com/pytorch/pytorch/blob/v2.12.0/torch/nn/attention/varlen.py"
REMOVE_WHEN = "torch>=2.12"


def _varlen():
    """The module that defines `varlen_attn`; None if nothing can use it."""
    import torch

    if not torch.cuda.is_available():  # unused, and importing it takes a second
        return None
    try:
        from torch.nn.attention import varlen
    except ImportError:  # torch < 2.10 does not have it
        return None
    return varlen


def needed() -> bool:
    """Whether `varlen_attn` supports windows (since torch 2.11) but rejects `enable_gqa` (accepted since 2.12)."""
    varlen = _varlen()
    if varlen is None:
        return False
    accepted = inspect.signature(varlen.varlen_attn).parameters
    return "window_size" in accepted and "enable_gqa" not in accepted


def apply() -> None:
    """Accept and ignore `enable_gqa`: the kernel infers the number of key-value heads from the shapes."""
    varlen = _varlen()
    if varlen is None or not needed():
        return
    original = varlen.varlen_attn

    @functools.wraps(original)
    def varlen_attn(*args, enable_gqa: bool = False, **kwargs):
        return original(*args, **kwargs)

    own = inspect.Parameter("enable_gqa", inspect.Parameter.KEYWORD_ONLY, default=False)
    signature = inspect.signature(original)
    varlen_attn.__signature__ = signature.replace(parameters=[*signature.parameters.values(), own])  # type: ignore[attr-defined]
    varlen.varlen_attn = varlen_attn
