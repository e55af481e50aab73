"""The attention of packs on a GPU: which kernel computes it, and how transformers' own layers reach it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from finetune.engine import multimodal
from finetune.engine.sharding import shard
from finetune.errors import UserError
from finetune.runtime.machine import flash
from finetune.runtime.ranks import distributed
from finetune.runtime.types import JsonObject, Model

PACKED = "finetune_packed"  # name among transformers' attention functions
WIDEST = 256  # head_dim of the variable-length kernel
FLASH_2 = "FlashAttention-2 (torch)"
FLASH_4 = "FlashAttention-4"
OTHER = "the model's own"
# Two bf16 kernels that are both right differ by the rounding of probabilities to 8 bits, about 0.3 % in norm.
LARGEST_DIFFERENCE = 0.01
FASTER = 0.97  # of torch's time; less is not worth compiling another kernel
REPEATS, ENOUGH = 5, 1000.0  # passes that are timed, and milliseconds after which no further one is
# Arguments of an attention function of transformers that need more than each head's queries, keys and values.
MORE = ("s_aux", "softcap", "position_bias", "indices", "block_indices")
DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")  # as configurations name it
# Settings of models that attend to the tokens that they choose (DeepSeek 3.2, Doge, MiniMax M3).
CHOICES = ("index_topk", "index_topk_blocks", "keep_window_size")


@dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """The kernel of a run, as run.json has it."""

    kernel: str
    reason: str
    # Of one layer at the shapes of this run's first pack, forward and backward, by kernel.
    milliseconds: dict[str, float] | None = None
    difference: float | None = None  # of FlashAttention-4 from torch: the largest of output and gradients, in norm
    masks: bool = False  # whether the rows attend through a mask


@dataclass(frozen=True, kw_only=True)
class AttentionShapes:
    """What the time of attention depends on."""

    heads: int
    key_value_heads: int
    head_dim: int
    lengths: tuple[int, ...]  # tokens of each document of a micro-batch
    dtype: torch.dtype


def shapes(model: Model, lengths: Sequence[int], dtype: torch.dtype) -> AttentionShapes:
    """The shapes of a model's attention over documents of these lengths; of its first layer where they differ."""
    config = model.config.get_text_config()
    config = config.per_layer_config[0] if getattr(config, "is_heterogeneous", False) else config
    heads = config.num_attention_heads
    return AttentionShapes(
        heads=heads,
        key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        lengths=tuple(int(length) for length in lengths),
        dtype=dtype,
    )


# --- choosing a kernel ------------------------------------------------------------------------------------------------


def choose(
    wanted: str, shapes: AttentionShapes, device: torch.device | str, documents: Sequence[int] = ()
) -> AttentionKernel:
    """Compare the kernels at these shapes and use the faster one from now on; the same one on all ranks.

    Args:
        wanted: model.packed_attention: auto, torch or flash_4.
        documents: the fewest and the most documents of a micro-batch.

    Raises:
        UserError: flash_4 is wanted and cannot be used.
    """
    flash.set_enabled(False)
    if wanted == "torch":
        return AttentionKernel(kernel=FLASH_2, reason="set by model.packed_attention")
    refusal = flash.why_unusable() or (None if flash.is_switch_installed() else "Unsloth was imported before it")
    if refusal is None and shapes.dtype not in (torch.bfloat16, torch.float16):
        refusal = f"it computes in 16 bits, and the model in {str(shapes.dtype).removeprefix('torch.')}"
    found = AttentionKernel(kernel=FLASH_2, reason=refusal) if refusal else compare(shapes, device, documents, wanted)
    agreed = distributed.sum_over_ranks([float(found.kernel == FLASH_4), float(found.difference is None)])
    ranks = distributed.ranks().world_size
    if wanted == "flash_4" and found.difference is None:
        raise UserError(
            f"model.packed_attention is flash_4, but {FLASH_4} cannot be used here: {found.reason}. Set it to auto."
        )
    if agreed[0] < ranks and found.kernel == FLASH_4 and (wanted == "auto" or agreed[1]):
        found = replace(found, kernel=FLASH_2, reason="another rank found it slower")
    if wanted == "flash_4" and not agreed[1]:
        found = replace(found, kernel=FLASH_4, reason="set by model.packed_attention")
    flash.set_enabled(found.kernel == FLASH_4)
    return found


def kernel_used(choice: AttentionKernel) -> AttentionKernel:
    """The choice after a step. The layers of a model, or libraries that change them, may not call the function that
    switches kernels."""
    if choice.kernel == FLASH_4 and flash.is_paused():
        return replace(
            choice, kernel=FLASH_2, reason="selective checkpointing keeps the output of torch's kernel alone"
        )
    if choice.kernel != FLASH_4 or flash.has_run():
        return choice
    reason = f"{FLASH_4} was chosen, but this model's layers never used it"
    return replace(choice, kernel=OTHER, reason=reason)


def compare(
    shapes: AttentionShapes, device: torch.device | str, documents: Sequence[int] = (), wanted: str = "auto"
) -> AttentionKernel:
    """Time both kernels and compare what they compute. Whatever FlashAttention-4 raises is a reason not to use it.

    If it is going to be used, what it compiles for another number of `documents` is compiled now, not in the middle of
    the run.
    """
    from torch.nn.attention.varlen import varlen_attn

    try:
        theirs, torchs_ms = measure(varlen_attn, shapes, device)
        flash.set_enabled(True)
        try:
            ours, flash_ms = measure(varlen_attn, shapes, device)
            if wanted == "flash_4" or flash_ms < FASTER * torchs_ms:
                for count in documents:
                    if (count > flash.MANY_DOCUMENTS) != (len(shapes.lengths) > flash.MANY_DOCUMENTS):
                        measure(varlen_attn, replace(shapes, lengths=(8,) * count), device)
        finally:
            flash.set_enabled(False)
    except Exception as error:  # compilers and kernels raise many types
        return AttentionKernel(kernel=FLASH_2, reason=f"{FLASH_4} failed: {type(error).__name__}: {str(error)[:200]}")
    each = torch.tensor([difference(one, other) for one, other in zip(ours, theirs, strict=True)])
    apart = float(each.max())  # NaN if one is
    milliseconds = {FLASH_2: torchs_ms, FLASH_4: flash_ms}
    if not apart <= LARGEST_DIFFERENCE:
        reason = f"{FLASH_4} differs by {apart:.2%} from torch, more than {LARGEST_DIFFERENCE:.0%}"
        return AttentionKernel(kernel=FLASH_2, reason=reason, milliseconds=milliseconds, difference=apart)
    faster = flash_ms < FASTER * torchs_ms
    times = f"{flash_ms:.2f} ms per layer, torch's {torchs_ms:.2f} ms"
    return AttentionKernel(
        kernel=FLASH_4 if faster else FLASH_2,
        reason=f"{FLASH_4} takes {times}, at this run's first micro-batch",
        milliseconds=milliseconds,
        difference=apart,
    )


def measure(
    attention: Callable[..., Any], shapes: AttentionShapes, device: torch.device | str
) -> tuple[list[torch.Tensor], float]:
    """Output and gradients of query, key and value for the same random input, and milliseconds, the median of
    REPEATS, or of fewer that take long.

    The tensors are [tokens, heads, head_dim].
    """
    generator = torch.Generator(device).manual_seed(0)
    tokens = sum(shapes.lengths)

    def random(heads: int) -> torch.Tensor:
        size = (tokens, heads, shapes.head_dim)
        return torch.randn(size, generator=generator, device=device, dtype=torch.float32).to(shapes.dtype)

    query, key, value = (random(n).requires_grad_() for n in (shapes.heads, *[shapes.key_value_heads] * 2))
    gradient = random(shapes.heads)
    bounds, longest = boundaries(torch.tensor(shapes.lengths, dtype=torch.int32))
    bounds = bounds.to(device)

    def forward() -> Any:
        options = {"window_size": flash.CAUSAL, **gqa_argument(attention)}
        return attention(query, key, value, bounds, bounds, longest, longest, **options)

    def once() -> list[torch.Tensor]:
        output = forward()
        return [output.detach(), *torch.autograd.grad(output, (query, key, value), gradient)]

    results = once()
    with torch.no_grad():  # as in evaluation and with checkpointing; FlashAttention-4 compiles another kernel
        forward()
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < ENOUGH:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        once()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return results, sorted(times)[len(times) // 2]


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """|one - other| / |other|, in the Euclidean norm."""
    return float((one.float() - other.float()).norm() / other.float().norm())


# --- transformers' own layers -----------------------------------------------------------------------------------------


def use_for_packs(model: Model, dtype: torch.dtype, *, compiles: bool = True) -> bool:
    """Let a transformers model that computes attention with SDPA use the variable-length kernel for packs: SDPA gets a
    mask of [tokens, tokens] and computes all of it. Likewise with flex_attention, which Unsloth chooses for wide heads.
    True if the model now does.

    Batches then need `batch_arguments`; without them it computes as before.

    Args:
        dtype: that the run computes attention in, under autocast also where the model's own parameters are float32.
        compiles: whether torch.compile may look into the attention. Not where Unsloth compiles decoder layers: it
            leaves a layer as it is if it cannot compile all of it.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    base = shard.base_model(model)
    own = base.config.get_text_config()._attn_implementation
    if own not in ("sdpa", "flex_attention") or why_not_computed(model) or why_no_kernel(model, dtype):
        return False
    kernel = packed_attention if compiles else torch.compiler.disable(packed_attention)
    ALL_ATTENTION_FUNCTIONS.register(PACKED, kernel)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    base.set_attn_implementation(PACKED)
    return True


def why_no_kernel(model: Model, dtype: torch.dtype) -> str | None:
    """Why the kernels for packs of a GPU cannot compute a model in `dtype` here; None if they can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return "the packed-attention kernel computes in 16 bits, and model.dtype is float32"
    if torch.cuda.get_device_capability()[0] < 8:
        return "the packed-attention kernel needs a GPU of compute capability 8.0 or newer"
    if wrong := [width for width in head_widths(model) if width % 8]:
        return f"the packed-attention kernel has no heads of {wrong[0]}, only multiples of 8"
    return None


def head_widths(model: Model) -> set[int]:
    """The head_dim of the attention layers that text reaches; empty if they do not name it."""
    reached = multimodal.outside_towers(model).values()
    widths = {getattr(module, "head_dim", None) for module in reached if hasattr(module, "is_causal")}
    return {width for width in widths if isinstance(width, int)}


def why_not_computed(model: Model) -> str | None:
    """What the attention of a transformers model has that `packed_attention` does not compute; None if nothing."""
    base = shard.base_model(model)
    config = base.config.get_text_config()
    name = config.model_type
    reached = multimodal.outside_towers(base).values()
    kinds = {type(module) for module in reached if hasattr(module, "is_causal")}
    # With it, layers pass on what the model is called with; those of families with recurrent layers do without it.
    uses = all("ALL_ATTENTION_FUNCTIONS" in _source(kind) for kind in kinds)
    if not getattr(base, "_supports_attention_backend", False) and not uses:
        return f"the attention of {name} does not go through transformers' attention interface"
    for setting in DROPOUTS:
        if getattr(config, setting, 0):
            return f"{name} has {setting} {getattr(config, setting)}"
    if getattr(config, "attn_logit_softcapping", None):
        return f"{name} has soft-capped attention"
    if any(parameter.rsplit(".", 1)[-1] == "sinks" for parameter, _ in base.named_parameters()):
        return f"{name} has attention sinks"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return f"{name} attends within chunks of a row"
    if getattr(config, "v_head_dim", None):
        return f"the value heads of {name} are of another width than its query heads"
    if any(getattr(config, setting, None) for setting in CHOICES):
        return f"{name} attends to the tokens that it chooses"
    if any(getattr(module, "is_causal", True) is False for module in reached):
        return f"{name} attends to tokens after each token"
    if getattr(config, "sliding_window", None) and any("sliding_window=" not in _source(kind) for kind in kinds):
        return f"{name} has its sliding window in the mask alone"  # Qwen2-MoE, Phi-3.5-MoE
    return None


def _source(kind: type[torch.nn.Module]) -> str:
    """Of a layer's forward pass; empty if there is none that would tell."""
    forward = kind.forward
    try:
        # On a GPU Unsloth puts layers in the place of transformers' that only call a function of this name.
        forward = getattr(forward, "__globals__", {}).get(f"{kind.__name__}_forward", forward)
        return inspect.getsource(inspect.unwrap(forward))
    except (OSError, TypeError):
        return ""


def found_in_call(attention_mask: torch.Tensor | None, arguments: JsonObject) -> str | None:
    """The same of a call for a packed row, in a model that `why_not_computed` does not know."""
    if attention_mask is not None and attention_mask.numel() > 1:  # not `batch_arguments`' placeholder
        return "a mask of its own"
    found = [name for name in MORE if arguments.get(name) is not None] + ["dropout"] * bool(arguments.get("dropout"))
    return found[0] if found else None


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **further: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each document of a packed row, or transformers' SDPA for other rows.

    Args:
        query, key, value: [rows, heads, tokens, head_dim]; one row if packed.
        further: with `cu_seq_lens_q`, int32 [documents + 1], where each document begins, and `max_length_q`, the row
            is packed.

    Returns:
        [rows, tokens, heads, head_dim], and no weights.

    Raises:
        UserError: the model's attention of a packed row needs more than that, or its layers lose the boundaries.
    """
    bounds = further.get("cu_seq_lens_q")
    if bounds is None:
        if attention_mask is not None and attention_mask.numel() == 1 < query.shape[2]:
            # The placeholder of `batch_arguments`, which SDPA would take for leave to see every token.
            raise UserError(
                "The layers of this model do not pass on where packed documents begin. Set model.attn_implementation: "
                "sdpa."
            )
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(  # type: ignore[return-value]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **further
        )
    wide = query.shape[-1] > WIDEST
    found = found_in_call(attention_mask, {"dropout": dropout, **further})
    if found is None and wide and sliding_window is not None:
        found = f"a sliding window over heads of {query.shape[-1]}"
    if found is not None:
        raise UserError(
            f"This model's attention has {found}, which the kernel for packs does not compute. Set "
            "model.attn_implementation: sdpa."
        )
    from torch.nn.attention.varlen import varlen_attn

    rows = kernel_inputs(query, key, value)
    longest = further["max_length_q"]
    if wide:
        return layer_output(wide_attention(rows, bounds, longest, scaling), value), None
    window = flash.CAUSAL if sliding_window is None else (sliding_window - 1, 0)
    options: JsonObject = {"scale": scaling, "window_size": window} | gqa_argument(varlen_attn)
    output: Any = varlen_attn(rows[0], rows[1], rows[2], bounds, bounds, longest, longest, **options)
    return layer_output(output, value), None


def wide_attention(
    rows: Sequence[torch.Tensor], bounds: torch.Tensor, longest: int, scaling: float | None
) -> torch.Tensor:
    """The same for heads wider than that kernel's (512 in Gemma 4): torch's memory-efficient kernel, which takes the
    boundaries of nested tensors. `rows` and output as that kernel's, [tokens, heads, head_dim]."""
    nested = []
    for one in rows:
        heads = one.repeat_interleave(rows[0].shape[1] // one.shape[1], dim=1)
        # The shortest is told, which torch would look up on the device, and 0 excludes the kernel.
        each = torch.nested.nested_tensor_from_jagged(heads, bounds, min_seqlen=1, max_seqlen=longest)
        nested.append(each.transpose(1, 2))
    output = F.scaled_dot_product_attention(nested[0], nested[1], nested[2], is_causal=True, scale=scaling)
    return output.transpose(1, 2).values()  # type: ignore[no-any-return]


def kernel_inputs(*layer: torch.Tensor) -> list[torch.Tensor]:
    """Query, key and value of a layer, [1, heads, tokens, head_dim], as the kernel takes them: [tokens, heads,
    head_dim] in its dtype."""
    dtype = kernel_dtype(layer[-1])
    return [tensor[0].transpose(0, 1).to(dtype) for tensor in layer]


def kernel_dtype(value: torch.Tensor) -> torch.dtype:
    """What the kernel computes in. Autocast casts the inputs of SDPA, but not those of this kernel. Outside of it, a
    QLoRA in float16 may have float32, which the kernel does not take on a GPU."""
    kind = value.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return torch.bfloat16 if kind == "cuda" and value.dtype == torch.float32 else value.dtype


def layer_output(output: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The kernel's output [tokens, heads, head_dim] as a layer expects it: [1, ...], in the dtype of its `value` unless
    autocast has chosen one."""
    return (output if torch.is_autocast_enabled(value.device.type) else output.to(value.dtype))[None]


def batch_arguments(lengths: torch.Tensor, device: torch.device) -> JsonObject:
    """What a packed batch has to carry for `packed_attention`, by the names of transformers' FlashAttentionKwargs.

    The attention mask is a placeholder of four dimensions, which transformers takes for a finished mask: it would
    otherwise look for document boundaries in the position ids, which costs a host-device sync, and write a mask of
    [tokens, tokens].

    Args:
        lengths: int32 [documents], on the host.
    """
    bounds, longest = boundaries(lengths)
    if device.type == "cuda":
        bounds = bounds.pin_memory().to(device, non_blocking=True)
    return {
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def boundaries(lengths: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Where each document begins and the last one ends, int32 [documents + 1], and the longest document's tokens."""
    zero = torch.zeros(1, dtype=torch.int32)
    return torch.cat([zero, lengths.cumsum(0, dtype=torch.int32)]), int(lengths.max())


@functools.cache
def gqa_argument(attention: Callable[..., object]) -> dict[str, bool]:
    """The argument that lets `attention` take fewer key than query heads; none in torch 2.11, which just does."""
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(attention).parameters else {}
