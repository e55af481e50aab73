"""Trials of a model on a few tokens, before it trains: whether two ways to compute the same agree up to rounding."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from finetune.engine.kernels import fp8, fused_lora
from finetune.engine.model.loading import keep_4bit_layout
from finetune.engine.sharding import shard
from finetune.runtime.ranks import distributed
from finetune.runtime.types import JsonObject, Model

SAMPLED_LAYERS, SAMPLED_TOKENS = 8, 512
# Differences by rounding, as shares of the largest value: experts may round differently beside other tokens.
IN_FLOAT32, IN_16_BITS = 1e-4, 0.05  # 16 bits round to 0.01 of it; GPUs may multiply float32 in TF32
APART, APART_IN_FP8 = 0.25, 0.75  # of the norm: 16 bits round deep models to a few percent, another document is 1.1 off
OF_ROUNDING = 4  # times what rounding the embeddings moves: 0.4 of the norm in a Gemma 4 with random weights
QUICK_TO_LOAD = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # cuDNN takes a second
DOCUMENTS = (24, 40, 8)  # tokens of those of the pack that is tried: more than a chunk of the gated delta rule


@contextlib.contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """Context without gradients and dropout, after which the model is as before: in its mode, and in its shards. Every
    rank enters it."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        if shard.is_sharded(model):
            shard.reshard(model)


def logits(model: Model, dtype: torch.dtype, *rows: JsonObject) -> list[torch.Tensor]:
    """The logits of rows as the trainer would compute them, float32 [tokens, vocabulary] each. Every rank calls it.

    Args:
        dtype: that the run computes in.
    """
    keep_4bit_layout(model)
    device = next(model.parameters()).device.type
    with evaluating(model), torch.autocast(device, dtype, enabled=dtype != torch.float32):
        return [model(**row, **_without_cache(model)).logits[0].float() for row in rows]


@dataclass(frozen=True, kw_only=True)
class Separation:
    """Whether the documents of a pack are apart in a model, as found by trying it."""

    leak: str | None  # how one reaches another; None if none does
    proof: str = ""


def separation(model: Model, dtype: torch.dtype, arguments: Callable[[Sequence[int]], JsonObject]) -> Separation:
    """Try a pack of three documents as the model trains on it, without dropout: the first one is changed, by which the
    outputs of the others must not move, and has no gradient from them, bit for bit. The second one has the outputs and
    gradients that it has alone. Where they are not equal, changing the third one, which none before it sees, measures
    the kernels' noise, and rounding the second one's embeddings what the model makes of it. Every rank calls it.

    Args:
        dtype: that the run computes in.
        arguments: what the model is called with beside the tokens, for documents of these lengths.
    """
    keep_4bit_layout(model)
    vocabulary, device = model.get_input_embeddings().weight.shape[0], next(model.parameters()).device
    # Gemma 3n and 4 have embeddings of each layer, for fewer tokens.
    vocabulary = min(vocabulary, getattr(model.config.get_text_config(), "vocab_size_per_layer_input", vocabulary))
    first, second, third = DOCUMENTS
    ids = torch.arange(sum(DOCUMENTS), device=device)[None] % vocabulary
    others, own = slice(first, None), slice(first, first + second)
    packed = arguments(DOCUMENTS)

    def changed(part: slice) -> torch.Tensor:
        found = ids.clone()
        found[:, part] = (found[:, part] + vocabulary // 2) % vocabulary
        return found

    def run(
        tokens: torch.Tensor, given: JsonObject, part: slice, rounding: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with contextlib.nullcontext() if given else sdpa_kernel(QUICK_TO_LOAD):  # packs as they train
            return _outputs_and_gradients(model, dtype, tokens, given, part, rounding)

    with _training_without_dropout(model):
        outputs, gradients = run(ids, packed, others)
        if bool(gradients[:first].any()):
            return Separation(leak="the gradient of a packed document reaches the one before it")
        noise = moved = (run(changed(slice(0, first)), packed, others)[0] - outputs)[others].abs().max()
        if _on_any_rank(model, bool(moved != 0)):
            noise = (run(changed(slice(-third, None)), packed, others)[0] - outputs)[own].abs().max()
        alone = rounded = run(ids[:, own], {}, slice(None))
        apart = APART_IN_FP8 if any(isinstance(module, fp8.Linear) for module in model.modules()) else APART
        pairs = list(zip(alone, (outputs[own], gradients[own]), strict=True))
        away = any(_is_another(*pair, dtype, apart) for pair in pairs)
        if dtype != torch.float32 and _on_any_rank(model, away):
            rounded = run(ids[:, own], {}, slice(None), torch.finfo(dtype).eps / 2)
    largest = outputs.abs().max()
    rounding = IN_FLOAT32 / 100 if device.type == "cpu" and dtype == torch.float32 else IN_16_BITS / 5
    if not moved <= max(4 * noise, rounding * largest):
        return Separation(leak=f"a packed document changes the outputs of the next one by {moved / largest:.1e}")
    for what, (one, other), near in zip(("outputs", "gradients"), pairs, rounded, strict=True):
        if _is_another(one, other, dtype, max(apart, OF_ROUNDING * float((near - one).norm() / one.norm()))):
            share = (one - other).norm() / one.norm()
            return Separation(leak=f"a document has other {what} in a pack than alone, {share:.2f} of their norm away")
    exact = (
        "bit for bit" if moved == 0 else f"within {moved / largest:.0e} (the kernels' noise is {noise / largest:.0e})"
    )
    return Separation(leak=None, proof=f"documents are apart {exact}")


def _on_any_rank(model: Model, own: bool) -> bool:
    """Whether this rank has found it, or one of those with which it computes each pass of a sharded model."""
    return any(distributed.gather_objects(own)) if shard.is_sharded(model) else own


def _outputs_and_gradients(
    model: Model, dtype: torch.dtype, ids: torch.Tensor, given: JsonObject, part: slice, rounding: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a row, whose embeddings are changed by the share `rounding`, up or down, and the gradients of these
    embeddings from random weights on the logits of a `part` of its tokens: float32 [tokens, vocabulary] and [tokens,
    width]."""
    begun: list[torch.Tensor] = []

    def begin(module: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        ways = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).sign().to(output.device)
        begun.append((output.detach().float() * (1 + rounding * ways)).to(output.dtype).requires_grad_())
        return begun[-1].clone()

    torch.manual_seed(0)
    hook = model.get_input_embeddings().register_forward_hook(begin)
    try:
        with torch.autocast(ids.device.type, dtype, enabled=dtype != torch.float32):
            found = model(input_ids=ids, **given, **_without_cache(model)).logits[0].float()
    finally:
        hook.remove()
    weights = torch.randn(found.shape[1], generator=torch.Generator().manual_seed(0)).to(found.device)
    (found[part] @ weights).sum().backward()
    model.zero_grad()
    return found.detach(), begun[0].grad[0].float()  # type: ignore[index]


@contextlib.contextmanager
def _training_without_dropout(model: Model) -> Iterator[None]:
    """Context in which a model computes as in training, for its kernels depend on it, but without dropout, and nothing
    is compiled: Unsloth drops what was compiled before training. Random numbers are drawn apart. Every rank enters it.
    """
    modes = {module: module.training for module in model.modules()}
    devices = {one.device for one in model.parameters() if one.device.type == "cuda"}
    model.train()
    for module in modes:
        if isinstance(module, nn.modules.dropout._DropoutNd) or _drops(module):
            module.training = False
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        if shard.is_sharded(model):
            shard.reshard(model)


def _drops(module: nn.Module) -> bool:
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items())


def _without_cache(model: Model) -> JsonObject:
    found: JsonObject = {"use_cache": False}
    if getattr(model.config, "output_router_logits", False):
        found["output_router_logits"] = False  # else a load-balancing loss is computed, of the tokens of whole rows
    return found


def differ(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether two results differ by more than rounding in a run that computes in `dtype`."""
    most = IN_FLOAT32 if one.device.type == "cpu" and dtype == torch.float32 else IN_16_BITS
    return bool((one - other).abs().max() > most * one.abs().max())


def _is_another(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype, apart: float = APART) -> bool:
    """Whether two results of passes of other shapes differ by more than rounding. 16 bits round each layer's output,
    and some tokens then have other experts: there the whole is compared, not each number."""
    if dtype == torch.float32:
        return differ(one, other, dtype)
    return bool((one - other).norm() > apart * one.norm())


def is_fused_head_exact(model: Any) -> bool:
    """Whether TRL's forward with a fused head yields the model's own log probabilities; with autocast if the caller has
    it on. It multiplies the output of the model's backbone with the head; some models do more with it (ModernBERT's
    decoder), or keep their backbone where TRL does not look (Llama 4's text model)."""
    base = shard.base_model(model)
    if base.base_model is base:
        return False
    embeddings = model.get_input_embeddings().weight
    ids = torch.arange(16, device=embeddings.device)[None] % embeddings.shape[0]
    with evaluating(model), sdpa_kernel(QUICK_TO_LOAD):
        found = model(input_ids=ids, labels=ids, use_cache=False, fused_lm_head=True).log_probs
        whole = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    own = whole.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return bool((found - own).isfinite().all()) and not differ(own, found, torch.float32)


def surviving_part(model: Model, rate: float, dtype: torch.dtype) -> float | None:
    """The share of an adapter's part of its layers' outputs that rounding leaves: 1 if nothing is lost. The adapter is
    as after one update of AdamW at `rate`, which sets each entry of B to about plus or minus the rate. The mean over up
    to 8 MLPs, each as a whole, and 8 other layers, on normally distributed inputs: <y - y0, part> / <part, part>, at
    most 1, y and y0 with and without the adapter's part. None without an adapter, or if the model is sharded, whose
    layers cannot be tried alone.

    Args:
        dtype: that the run computes in.
    """
    mlps = [one for one in model.modules() if fused_lora.is_plain_mlp(one) and _adapted(*_mlp(one))]
    within = {id(layer) for mlp in mlps for layer in _mlp(mlp)}
    alone = [layer for layer in model.modules() if _adapted(layer) and id(layer) not in within]
    tried = [(one, _mlp(one)) for one in _sample(mlps)] + [(one, [one]) for one in _sample(alone)]
    if not tried or shard.is_sharded(model):
        return None
    keep_4bit_layout(model)
    generator, shares = torch.Generator().manual_seed(0), []
    with evaluating(model), torch.compiler.set_stance("force_eager"):
        for module, layers in tried:
            bs = [layer.lora_B[fused_lora.active_adapter(layer)].weight.data for layer in layers]
            before, device = [b.clone() for b in bs], bs[0].device
            x = torch.randn(1, SAMPLED_TOKENS, layers[0].in_features, generator=generator).to(device, dtype)
            # B is not the same in both passes: autocast would keep its cast.
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32, cache_enabled=False):
                for b in bs:
                    b.zero_()
                y0 = module(x).double()
                for b in bs:
                    b.copy_(rate * torch.randn(b.shape, generator=generator).sign())
                y, part = module(x).double(), _first_order(layers, x)
            for b, old in zip(bs, before, strict=True):
                b.copy_(old)
            # Above 1 where the frozen product was exactly between two numbers, which any part decides.
            shares.append((((y - y0) * part).sum() / (part * part).sum()).clamp(max=1).cpu())
    return float(torch.stack(shares).mean().clamp(min=0))  # not a number if an output is not


def _mlp(module: Any) -> list[Any]:
    return [getattr(module, name, None) for name in fused_lora.MLP]


def _adapted(*layers: Any) -> bool:
    """Whether each is a linear layer with one active adapter."""
    from peft.tuners.lora import LoraLayer

    return all(
        isinstance(layer, LoraLayer)
        and isinstance(layer.get_base_layer(), nn.Linear)
        and fused_lora.active_adapter(layer) is not None
        for layer in layers
    )


def _sample(modules: list[Any]) -> list[Any]:
    return modules[:: max(1, -(-len(modules) // SAMPLED_LAYERS))]


def _first_order(layers: list[Any], x: torch.Tensor) -> torch.Tensor:
    """What the adapters change in the output of a layer, or to first order in that of an MLP silu(gate) * up, in
    float64 but for products of frozen weights."""

    def part(layer: Any, x: torch.Tensor) -> torch.Tensor:
        name = fused_lora.active_adapter(layer)
        a, b = (one[name].weight.double() for one in (layer.lora_A, layer.lora_B))
        return layer.scaling[name] * (x.double() @ a.t()) @ b.t()

    if len(layers) == 1:
        return part(layers[0], x)
    gate, up = (layer.get_base_layer()(x).double() for layer in layers[:2])
    sigmoid = gate.sigmoid()
    moved = sigmoid * (1 + gate * (1 - sigmoid)) * up * part(layers[0], x) + gate * sigmoid * part(layers[1], x)
    down = layers[2].get_base_layer()
    through = down(moved.to(x.dtype)).double() - (0 if down.bias is None else down.bias.double())
    return through + part(layers[2], gate * sigmoid * up)
