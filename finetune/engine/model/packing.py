"""Whether a model can train on packs of documents, and what it needs for it."""

from __future__ import annotations

import inspect

import torch

from finetune.config import Config
from finetune.data.packs import MAX_PADDING_SEGMENT
from finetune.engine.kernels import attention, context_attention
from finetune.engine.model import positions, trial
from finetune.engine.model.load_arguments import resolve_dtype
from finetune.engine.sharding import shard
from finetune.errors import UserError
from finetune.runtime.bootstrap import Stack
from finetune.runtime.ranks import distributed
from finetune.runtime.ranks.context_group import ContextGroup
from finetune.runtime.types import JsonObject, Model

# Attention kernels that separate the documents of a packed row, by restarting position ids or by lengths.
_PACKS = ("sdpa", attention.PACKED, "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
# Models that Unsloth does not pack, beside multimodal ones: soft-capped attention that it cannot compile this way, and
# attention sinks.
_UNSLOTH_DOES_NOT_PACK = ("gemma2", "gpt_oss")


def why_not_packed(model: Model, stack: Stack) -> str | None:
    """Why packed documents would attend to each other in this model; None if they do not."""
    config = model.config
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    recurrent = sorted(kinds - {"full_attention", "sliding_attention", "chunked_attention"})
    names = {type(module).__name__ for module in model.modules()}
    recurrent += sorted(
        name for name in names if any(part in name for part in ("Mamba", "GatedDelta", "Rwkv", "ShortConv"))
    )
    if recurrent:
        return f"{text.model_type} has layers that carry a state from one document to the next ({recurrent[0]})"
    if stack.backend == "unsloth" and (config is not text or text.model_type in _UNSLOTH_DOES_NOT_PACK):
        return f"Unsloth does not separate packed documents in {config.model_type}"
    table = positions.limit(model)
    if table is not None and table < MAX_PADDING_SEGMENT:
        return f"{text.model_type} has a table of {table} positions, fewer than the padding of a pack may take"
    own = str(text._attn_implementation)
    if own not in _PACKS:
        return f"attention {own!r} is not known to separate packed documents"
    forward = type(shard.base_model(model)).forward
    if stack.backend == "transformers" and "position_ids" not in inspect.signature(forward).parameters:
        return f"{text.model_type} takes no position ids, which say where a packed document begins"
    return None


def prepare_for_packs(model: Model, config: Config, stack: Stack) -> str | None:
    """On a GPU, enable variable-length attention over packs, in Unsloth's layers and in transformers' own, which keep
    an attention that the user has set. Every rank calls it.

    Returns:
        Why packed documents would attend to each other all the same; None if they do not.
    """
    if stack.backend == "transformers":
        dtype = resolve_dtype(config, stack)
        if model.config._attn_implementation == "flex_attention":
            return None  # it would compile for the trial
        if stack.device == "cuda" and config.model.attn_implementation is None:
            if attention.use_for_packs(model, dtype) and _any_attends_across_documents(model, dtype):
                shard.base_model(model).set_attn_implementation("sdpa")  # no layer gets the boundaries (Nemotron)
        if model.config._attn_implementation != attention.PACKED and _any_attends_across_documents(model, dtype):
            return f"a packed document attends to the one before it in {model.config.model_type}, which was tried"
        return None
    if stack.device != "cuda":
        return None
    from unsloth.utils.hf_packed_attention import enable_hf_packed_attention
    from unsloth.utils.packing import mark_allow_overlength

    mark_allow_overlength(model)  # several packs form one row, longer than max_seq_length
    enable_hf_packed_attention()
    chosen = config.model.full_finetuning or config.model.attn_implementation is not None
    if not chosen and not _has_unsloths_attention(model):
        # Unsloth would have transformers write a mask of [tokens, tokens] and compare all of it with the documents in
        # each step, which syncs three times. In full fine-tuning the call is part of a compiled block.
        attention.use_for_packs(model, resolve_dtype(config, stack), compiles=False)
    return None


def _has_unsloths_attention(model: Model) -> bool:
    """Whether Unsloth has replaced the attention of this architecture, as that of Llama, Qwen and Gemma."""
    layers = [type(module) for module in model.modules() if hasattr(module, "is_causal")]
    return any(layer.forward.__module__.startswith("unsloth.") for layer in layers)


def prepare_for_shared_rows(model: Model, config: Config, stack: Stack, context: ContextGroup) -> None:
    """Let the ranks of a group compute attention together. The documents of a micro-batch form one row.

    Raises:
        UserError: this model cannot.
    """
    why = why_not_packed(model, stack) or context_attention.why_not_shared(model, resolve_dtype(config, stack))
    if why is not None:
        raise UserError(_not_shared(why, context))
    context_attention.install(model, context)
    if any(distributed.gather_objects(_depends_on_parts(model, resolve_dtype(config, stack), context))):
        why = f"{model.config.model_type} gives other logits for a part of a row than for all of it, which was tried"
        raise UserError(_not_shared(why, context))


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


def _any_attends_across_documents(model: Model, dtype: torch.dtype) -> bool:
    """Whether `_attends_across_documents` is true on any rank. Every rank calls it."""
    return any(distributed.gather_objects(_attends_across_documents(model, dtype)))


def _attends_across_documents(model: Model, dtype: torch.dtype) -> bool:
    """Whether the logits of a packed document change with the document before it. Not every model of transformers
    passes the position ids on to where the mask is made (OPT and BioGPT do not), or the boundaries to its layers.

    Args:
        dtype: that the run computes in.
    """
    device, vocabulary = next(model.parameters()).device, model.get_input_embeddings().weight.shape[0]
    first, tokens = 8, 20
    ids = torch.arange(tokens, device=device)[None] % vocabulary
    other = torch.cat([(ids[:, :first] + vocabulary // 2) % vocabulary, ids[:, first:]], dim=1)
    places = torch.cat([torch.arange(first), torch.arange(tokens - first)])[None].to(device)
    given = {"position_ids": places}
    if model.config._attn_implementation == attention.PACKED:
        given |= attention.batch_arguments(torch.tensor([first, tokens - first], dtype=torch.int32), device)
    try:
        found, changed = trial.logits(model, dtype, *({"input_ids": one, **given} for one in (ids, other)))
    except UserError:  # the layers lose the boundaries
        return True
    return trial.differ(found[first:], changed[first:], dtype)
