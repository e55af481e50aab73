"""4-bit weights as float32: the same bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from finetune.engine.sharding import (
    quantized_storage,
)


def four_bits(rows: int, columns: int) -> Any:
    from bitsandbytes.nn import Linear4bit, Params4bit

    torch.manual_seed(0)
    layer = Linear4bit(columns, rows, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    weight: Any = Params4bit
    layer.weight = weight(torch.randn(rows, columns), requires_grad=False, quant_type="nf4")
    return layer.to("cpu")


def test_4_bit_weights_are_stored_as_float32_with_the_same_bytes() -> None:
    from bitsandbytes.functional import dequantize_4bit

    layer, x = four_bits(24, 64), torch.randn(3, 64)
    expected = x @ dequantize_4bit(layer.weight.data, layer.weight.quant_state).t()
    content = layer.weight.data.view(torch.uint8).flatten().clone()
    assert quantized_storage.store_as_float32(nn.ModuleList([layer]), torch.device("cpu")) == 1
    assert layer.weight.dtype == torch.float32 and layer.weight.shape == (len(content) // 4, 1)
    assert torch.equal(layer.weight.data.view(torch.uint8).flatten(), content)
    assert torch.allclose(layer(x), expected, atol=1e-5)


def test_a_4_bit_layer_on_a_cpu_has_the_right_gradient_after_an_evaluation() -> None:
    """On CPUs with AVX512-BF16, bitsandbytes repacks weights in the first evaluation and then computes with a kernel
    without a backward pass. On others this passes anyway."""
    from bitsandbytes.functional import dequantize_4bit

    from finetune.engine.model.loading import keep_4bit_layout

    layer, x, gradient = four_bits(64, 64), torch.randn(3, 64, requires_grad=True), torch.randn(3, 64)
    expected = gradient @ dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    keep_4bit_layout(layer)
    layer.eval()
    with torch.no_grad():
        layer(x)
    layer.train()
    layer(x).backward(gradient)
    assert x.grad is not None and torch.allclose(x.grad, expected, atol=1e-5)
