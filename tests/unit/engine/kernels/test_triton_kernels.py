"""Triton's kernels inside of what torch.compile compiles: Inductor passes Python's floats in float64."""

from __future__ import annotations

from typing import Any

import pytest

GATED = {"weights": "*fp32", "dweights": "*fp32", "ends": "*i32", "columns": "i32", "tiles": "i32"}
GATED_SIZES = {"RANK": 16, "LAST_RANK": 16, "PADDED": 16, "EXPERTS": 4, "ALL": 4}
SILU = {"up_scaling": "fp64", "gate_scaling": "fp64"}
SILU_SIZES = {"GATE_RANK": 16, "UP_RANK": 16, "DOWN_RANK": 16, "PADDED": 16}
TILE = {"PRECISION": "tf32", "STAGES": 3, "ROWS": 64, "COLUMNS": 64}


@pytest.mark.process  # ptxas
@pytest.mark.parametrize(
    ("module", "name", "types", "sizes"),
    [
        ("triton_experts", "_gated", GATED, GATED_SIZES),
        ("triton_experts", "_gated_backward", GATED, GATED_SIZES),
        ("triton_kernels", "_silu_forward", SILU, SILU_SIZES),
    ],
)
def test_kernels_compute_in_float32(module: str, name: str, types: dict[str, str], sizes: dict[str, Any]) -> None:
    """Compiled without a GPU. What is left in float64 are the scalings' conversions."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    kernel = getattr(pytest.importorskip(f"finetune.engine.kernels.{module}"), name)
    constants = sizes | TILE
    pointers = "gate up inner b h dh last_a dlast_inner product products down gate_up dgate_up dinner".split()
    pointers += [f"{one}_{side}" for one in ("gate", "up") for side in ("left", "right")]
    known = dict.fromkeys(pointers, "*bf16") | {"scaling": "fp64"} | types | dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature={one: known.get(one, "i32") for one in kernel.arg_names},
        constexprs={(kernel.arg_names.index(one),): value for one, value in constants.items()},
    )
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert "mma" in code and code.count("f64") < 10
