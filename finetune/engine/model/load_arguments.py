"""Arguments of the loaders that follow from a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from finetune.config import Config
from finetune.runtime.bootstrap import Stack
from finetune.runtime.machine import hardware

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig
    from transformers.utils.quantization_config import Mxfp4Config


def resolve_dtype(config: Config, stack: Stack) -> torch.dtype:
    """The configured dtype; `auto` is the fastest."""
    return _fastest(stack) if config.model.dtype == "auto" else getattr(torch, config.model.dtype)


def emulation_note(config: Config, stack: Stack) -> str | None:
    """What a dtype costs that the device has no units for; None if it has."""
    dtype, fastest = resolve_dtype(config, stack), _fastest(stack)
    if dtype in (fastest, torch.float32) or dtype == torch.float16 and stack.device == "cuda":
        return None
    given, better = (str(one).removeprefix("torch.") for one in (dtype, fastest))
    return f"This device has no units for {given}: slower than {better}, which model.dtype: auto takes"


def _fastest(stack: Stack) -> torch.dtype:
    """bfloat16 if the device has units for it; else float16 on a GPU, which has those, and float32 on a CPU, where
    torch emulates 16 bits."""
    if hardware.has_bfloat16(stack.device):
        return torch.bfloat16
    return torch.float32 if stack.device == "cpu" else torch.float16


def quantization_bits(config: Config) -> int | None:
    """Bits of the quantized weights; None without quantization."""
    return 4 if config.model.load_in_4bit else 8 if config.model.load_in_8bit else None


def quantization_config(bits: int | None, dtype: torch.dtype) -> BitsAndBytesConfig | None:
    """The transformers backend's quantization of frozen weights to 4 or 8 bits; None for None.

    Args:
        dtype: that 4-bit weights are multiplied in.
    """
    from transformers import BitsAndBytesConfig

    if bits == 4:  # NF4 with double quantization: the QLoRA paper, arXiv 2305.14314
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    return BitsAndBytesConfig(load_in_8bit=True) if bits == 8 else None


def dequantization_config(name: str, revision: str | None) -> Mxfp4Config | None:
    """Of a model whose files have experts in MXFP4, as gpt-oss's: 16 bits. transformers' kernels for MXFP4 have no
    backward pass."""
    from transformers import PretrainedConfig
    from transformers.utils.quantization_config import Mxfp4Config

    found, _ = PretrainedConfig.get_config_dict(name, revision=revision)
    quantized = found.get("quantization_config") or {}
    return Mxfp4Config(dequantize=True) if quantized.get("quant_method") == "mxfp4" else None


def attention_arguments(config: Config) -> dict[str, str]:
    chosen = config.model.attn_implementation
    return {} if chosen is None else {"attn_implementation": chosen}
