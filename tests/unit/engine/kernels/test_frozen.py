"""What survives of an adapter's part that is far below the last place of its layer's output, on every path: all of it.
Against the part in float64. The shares that PEFT keeps show that these parts are small enough to be lost.

`python -m pytest -m gpu tests/unit/engine/kernels/test_frozen.py` asks a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from finetune.engine.kernels import fp8, frozen, fused_lora
from finetune.engine.kernels.low_rank import aligned
from tests.helpers.kernels import ATTENTION, BOTH, model_of, surviving_share, with_adapter

WIDTH, RANK = 256, 8
# Triton and bitsandbytes start processes to find CUDA, and torchao warns as it is imported.
GPU = [pytest.mark.gpu, pytest.mark.process, pytest.mark.filterwarnings("default")]
# Device, tokens, part of the output, and how far the share may be from 1: three standard errors of what rounding leaves
# to chance. CPUs are slow in bfloat16.
CASES = [
    ("cpu", 768, 1e-3, 0.03),
    pytest.param("cuda", 65_536, 1e-3, 0.01, marks=GPU),
    pytest.param("cuda", 262_144, 3e-4, 0.01, marks=GPU),
]
EACH = pytest.mark.parametrize(("device", "tokens", "part", "tolerance"), CASES, ids=lambda value: str(value))


def base_layer(kind: str, device: str, out: int = WIDTH, inputs: int = WIDTH) -> Any:
    """A frozen layer as a checkpoint of this kind has it, with outputs of variance 1."""
    plain = nn.Linear(inputs, out, bias="bias" in kind).requires_grad_(False)
    nn.init.normal_(plain.weight, std=inputs**-0.5)
    if "bias" in kind:
        nn.init.normal_(plain.bias, std=4.0)
    plain = plain.to(device, torch.bfloat16)
    if kind == "FP8":
        return fp8.Linear(plain)
    if kind in ("16 bits with room", "bias"):
        frozen.make_room(plain, 3 * RANK)
        assert plain.weight.stride(0) > inputs
    if kind in ("NF4", "8 bits"):
        import bitsandbytes as bnb

        sizes: dict[str, Any] = {"bias": False}
        if kind == "NF4":
            sizes |= {"compute_dtype": torch.bfloat16, "quant_type": "nf4", "compress_statistics": True}
        else:
            sizes |= {"has_fp16_weights": False}
        stored = (bnb.nn.Linear4bit if kind == "NF4" else bnb.nn.Linear8bitLt)(inputs, out, **sizes)
        stored.load_state_dict(plain.cpu().state_dict())
        return stored.to(device)
    return plain


def factors(part: float, device: str, out: int = WIDTH, inputs: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of an adapter whose part of an output has this size."""
    a = (torch.rand(RANK, inputs, device=device) * 2 - 1) * (3 / inputs) ** 0.5
    return a, torch.randn(out, RANK, device=device) * part * RANK**-0.5


@EACH
@pytest.mark.parametrize(
    "kind",
    ["16 bits", "16 bits with room", "bias", "NF4", "8 bits", pytest.param("FP8", marks=pytest.mark.fp8)],
)
def test_no_part_of_a_projection_is_lost(kind: str, device: str, tokens: int, part: float, tolerance: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(tokens, WIDTH, device=device).bfloat16()
    layers = [base_layer(kind, device) for _ in range(3)]
    pairs = [factors(part, device) for _ in layers]
    scalings = (1.0, 1.0, 0.5)
    group = fused_lora.Group(tuple(layers), scalings, (RANK,) * 3)

    def outputs(scale: float) -> Any:
        with torch.autocast(device, torch.bfloat16):  # as in a run
            return fused_lora._Project.apply(x, group, *[f for a, b in pairs for f in (a, b * scale)])

    for y, without, (a, b), scaling in zip(outputs(1.0), outputs(0.0), pairs, scalings, strict=True):
        expected = scaling * (x.double() @ a.double().t()) @ b.double().t()
        tolerance *= 2 if scaling == 0.5 else 1  # half the part, twice its error
        if kind == "bias":
            tolerance *= 4  # the sum has two bits less for it
        assert surviving_share(y, without, expected) == pytest.approx(1, abs=tolerance)
    peft = without + (scaling * (x @ a.bfloat16().t()) @ b.bfloat16().t())
    assert surviving_share(peft, without, expected) < 0.6


@EACH
@pytest.mark.parametrize("kind", ["16 bits", "NF4", "8 bits", pytest.param("FP8", marks=pytest.mark.fp8)])
@pytest.mark.parametrize("where", ["gate and up", "down"])
def test_no_part_of_an_mlp_is_lost(
    where: str, kind: str, device: str, tokens: int, part: float, tolerance: float
) -> None:
    torch.manual_seed(0)
    x = torch.randn(tokens, WIDTH, device=device).bfloat16()
    layers = [base_layer(kind, device) for _ in range(3)]
    if kind == "FP8":
        part *= 10  # h is quantized after gate and up: its steps are 32 times those of bfloat16
    zero = torch.zeros(WIDTH, RANK, device=device)
    (gate_a, gate_b), (up_a, up_b), (down_a, down_b) = (factors(part, device) for _ in layers)
    gate_b, up_b, down_b = (zero, zero, down_b) if where == "down" else (gate_b, up_b, zero)
    first = fused_lora.Group(tuple(layers[:2]), (1.0, 1.0), (RANK, RANK))
    last = fused_lora.Group((layers[2],), (1.0,), (RANK,))

    def output(scale: float) -> torch.Tensor:
        given = (gate_a, gate_b * scale, up_a, up_b * scale, down_a, down_b * scale)
        with torch.autocast(device, torch.bfloat16):  # as in a run
            return fused_lora._Mlp.apply(x, first, last, *given)  # type: ignore[no-any-return]

    gate_w, up_w, down_w = (frozen.weight(one, torch.float64) for one in layers)
    exact = x.double()

    def hidden(scale: float) -> torch.Tensor:
        gate, up = (
            exact @ w.t() + scale * (exact @ a.double().t()) @ b.double().t()
            for w, a, b in ((gate_w, gate_a, gate_b), (up_w, up_a, up_b))
        )
        return nn.functional.silu(gate) * up

    if where == "down":
        expected = (hidden(0) @ down_a.double().t()) @ down_b.double().t()
    else:
        expected = (hidden(1) - hidden(0)) @ down_w.t()
    assert surviving_share(output(1.0), output(0.0), expected) == pytest.approx(1, abs=3 * tolerance)


@EACH
@pytest.mark.parametrize("where", BOTH)
def test_no_part_of_an_expert_is_lost(where: str, device: str, tokens: int, part: float, tolerance: float) -> None:
    """Against the same experts in float32 by transformers and PEFT."""
    from finetune.engine.kernels import grouped_experts

    torch.manual_seed(0)
    base = model_of("mixtral", num_local_experts=4, hidden_size=128, intermediate_size=128, num_hidden_layers=1)
    model = with_adapter(base, [where], r=RANK, lora_alpha=RANK, target_modules=ATTENTION[:1]).to(device)
    for name, one in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(one, std=part * RANK**-0.5)
        elif "experts" in name and "lora" not in name:
            nn.init.normal_(one, std=128**-0.5)
    layer = model.base_model.model.model.layers[0].mlp.experts
    tokens *= 4 if device == "cuda" else 12
    x = torch.randn(tokens, 128, device=device)
    weights, numbers = torch.rand(tokens, 4, device=device).softmax(-1).topk(2)

    def outputs(dtype: torch.dtype) -> list[torch.Tensor]:
        model.to(dtype)
        found = []
        for scale in (1.0, 0.0):
            for one in grouped_experts._nested(layer):
                if hasattr(one, "scaling"):
                    one.scaling["default"] = scale
            with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
                found.append(layer(x.bfloat16().to(dtype), numbers, weights.bfloat16().to(dtype)))
        return found

    model.bfloat16()
    y, without = outputs(torch.float32)
    size = float((y - without).std() / without.std())
    for name, one in model.named_parameters():
        if "lora_B" in name:
            one.data = (one.data * (part / size)).bfloat16()
    y, without = outputs(torch.float32)
    expected = y - without
    assert grouped_experts.install(model) == 1
    y, without = outputs(torch.bfloat16)
    assert surviving_share(y, without, expected) == pytest.approx(1, abs=0.01)


def test_a_layer_may_be_computed_alone_and_with_others_in_turn() -> None:
    """The room of its weight then has columns of another place."""
    torch.manual_seed(0)
    x = torch.randn(64, WIDTH).bfloat16()
    layers = [base_layer("16 bits with room", "cpu") for _ in range(2)]
    pairs = [factors(1.0, "cpu") for _ in layers]
    both = fused_lora.Group(tuple(layers), (1.0, 1.0), (RANK, RANK))
    alone = fused_lora.Group((layers[1],), (1.0,), (RANK,))
    given = [one for pair in pairs for one in pair]
    together = fused_lora._Project.apply(x, both, *given)[1]
    for _ in range(2):
        assert torch.equal(fused_lora._Project.apply(x, alone, *pairs[1])[0], together)
        assert torch.equal(fused_lora._Project.apply(x, both, *given)[1], together)


def test_what_lies_behind_a_row_is_a_number() -> None:
    """oneDNN's kernels for AMX multiply it by 0. In this mode, torch fills what is not initialized with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        wide = aligned(32, 57, torch.empty(0), torch.bfloat16)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.isfinite(wide.as_strided((32, 64), (64, 1))).all()
