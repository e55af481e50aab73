"""Whether a model can train on packs of documents, and what it needs for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from finetune.config import Config
from finetune.engine.kernels import attention, by_document, context_attention
from finetune.engine.model import trial
from finetune.engine.model.load_arguments import resolve_dtype
from finetune.errors import UserError
from finetune.runtime.bootstrap import Stack
from finetune.runtime.ranks import distributed
from finetune.runtime.ranks.context_group import ContextGroup
from finetune.runtime.types import JsonObject, Model


def prepare_for_packs(model: Model, config: Config, stack: Stack) -> trial.Separation:
    """Try whether the documents of a pack are apart in a model, with the kernels that it trains with; where they are
    not, compute what carries one into the next on each document alone. On a GPU, first enable variable-length attention
    over packs, in Unsloth's layers and in transformers' own, which keep an attention that the user has set. Every rank
    calls it.
    """
    dtype = resolve_dtype(config, stack)
    if stack.device == "cuda":
        _use_kernels(model, config, stack, dtype)
    if model.config.get_text_config()._attn_implementation == "flex_attention":  # which the trial would not compile
        why = by_document.carries_state(model)
        why = why and f"{why}; with model.attn_implementation: sdpa its documents can be kept apart"
        return trial.Separation(leak=why, proof="flex_attention's mask keeps documents apart, which was not tried")
    found = _tried(model, dtype, stack)
    changes = [by_document.separate_convolutions, by_document.separate_recurrent]
    changes.insert(2 if model.config._attn_implementation == attention.PACKED else 0, by_document.give_masks)
    slower = ""
    for change in changes:
        if found.leak is not None and change(model):
            found = _tried(model, dtype, stack)
            if change is by_document.separate_recurrent:
                slower = "; recurrent layers run document by document, slower than a kernel for packs"
    return replace(found, proof=found.proof + slower)


def _tried(model: Model, dtype: torch.dtype, stack: Stack) -> trial.Separation:
    """What all ranks have found: the first leak of one, if there is one. Every rank calls it."""
    device = next(model.parameters()).device

    def arguments(lengths: Sequence[int]) -> JsonObject:
        places = torch.cat([torch.arange(one) for one in lengths])[None].to(device)
        tokens = torch.tensor(lengths, dtype=torch.int32)
        return {"position_ids": places} | by_document.arguments_of_pack(model, stack.backend)(tokens, device)

    try:
        own = trial.separation(model, dtype, arguments)
    except Exception as error:  # layers raise many types where they lose the boundaries
        why = f"fails on a pack: {type(error).__name__}: {str(error)[:200]}"
        own = trial.Separation(leak=f"it {why}")
        if stack.device == "cuda" and has_unsloths_attention(model) and not by_document.recurrent_layers(model):
            own = trial.Separation(leak=None, proof=f"documents are apart in Unsloth's attention; the trial {why}")
    all_found = distributed.gather_objects(own)
    name = model.config.get_text_config().model_type
    leak = next((one.leak for one in all_found if one.leak is not None), None)
    return own if leak is None else trial.Separation(leak=f"{leak} in {name}, which was tried")


def _use_kernels(model: Model, config: Config, stack: Stack, dtype: torch.dtype) -> None:
    """Enable the kernels of a GPU for packs."""
    if stack.backend == "transformers":
        if config.model.attn_implementation is None:
            attention.use_for_packs(model, dtype)
        return
    from unsloth.utils.hf_packed_attention import enable_hf_packed_attention
    from unsloth.utils.packing import mark_allow_overlength

    mark_allow_overlength(model)  # several packs form one row, longer than max_seq_length
    enable_hf_packed_attention()
    chosen = config.model.full_finetuning or config.model.attn_implementation is not None
    if not chosen and not has_unsloths_attention(model):
        # Unsloth would have transformers write a mask of [tokens, tokens] and compare all of it with the documents in
        # each step, which syncs three times. In full fine-tuning the call is part of a compiled block.
        attention.use_for_packs(model, dtype, compiles=False)


def has_unsloths_attention(model: Model) -> bool:
    """Whether Unsloth has replaced the attention of this architecture, as that of Llama, Qwen and Gemma."""
    layers = [type(module) for module in model.modules() if hasattr(module, "is_causal")]
    return any(layer.forward.__module__.startswith("unsloth.") for layer in layers)


def prepare_for_shared_rows(model: Model, config: Config, stack: Stack, context: ContextGroup) -> str:
    """Let the ranks of a group compute attention together. The documents of a micro-batch form one row.

    Returns:
        How it was tried that they are apart.

    Raises:
        UserError: this model cannot.
    """
    dtype = resolve_dtype(config, stack)
    why = by_document.carries_state(model) or context_attention.why_not_shared(model, dtype)
    found = trial.Separation(leak=why) if why else prepare_for_packs(model, config, stack)
    if found.leak is not None:
        raise UserError(_not_shared(found.leak, context))
    context_attention.install(model, context)
    if any(distributed.gather_objects(_depends_on_parts(model, dtype, context))):
        why = f"{model.config.model_type} gives other logits for a part of a row than for all of it, which was tried"
        raise UserError(_not_shared(why, context))
    return found.proof


def _not_shared(why: str, context: ContextGroup) -> str:
    key = "training.context_parallel"
    return f"{key} is {context.size}, which does not work here: {why}. Set {key} to 1."


def _depends_on_parts(model: Model, dtype: torch.dtype, context: ContextGroup) -> bool:
    """Whether this rank's logits change if it has a part of a short document instead of all: something else than
    attention looks at other tokens. A process that stands in for all ranks has no tokens of theirs: there each token is
    a document, which is all that attention sees."""
    each, size = 8, context.size
    count, alone = each * size, context.processes < size
    device, vocabulary = next(model.parameters()).device, model.get_input_embeddings().weight.shape[0]
    ids, places = (torch.arange(count, device=device) % vocabulary)[None], torch.arange(count, device=device)[None]
    own = slice(context.part * each, (context.part + 1) * each)

    def bounds(*lengths: int) -> JsonObject:
        return attention.batch_arguments(torch.tensor(lengths, dtype=torch.int32), device)

    whole, part = trial.logits(
        model,
        dtype,
        {"input_ids": ids, "position_ids": places, **(bounds(*[1] * count * size) if alone else {})},
        {
            "input_ids": ids[:, own],
            "position_ids": places[:, own],
            **(bounds(*[1] * count) if alone else bounds(count)),
        },
    )
    return trial.differ(whole[own], part, dtype)
