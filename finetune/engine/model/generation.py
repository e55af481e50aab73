"""Greedy completions of tokenized prompts."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import torch

from finetune.engine.model import positions
from finetune.engine.optimizer import master_weights
from finetune.errors import UserError
from finetune.runtime.types import Model, Tokenizer

Answer = TypeVar("Answer")
Prompt = TypeVar("Prompt", bound=Sequence[int])


def generate(
    model: Model,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stops: Collection[int] = (),
    batch_size: int = 32,
    with_other_ranks: bool = False,
) -> list[tuple[str, bool]]:
    """Greedy completions of tokenized prompts, each as text without special tokens, and whether it came to an end.

    Args:
        prompts: token ids of each prompt, up to the start of the assistant's turn.
        max_new_tokens: per answer; an end token ends it earlier.
        stops: end tokens beside those of the model and the tokenizer.
        with_other_ranks: go on until every rank has finished, as a sharded model needs it.
    """
    from transformers import GenerationConfig

    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=sorted({*end_tokens(model, tokenizer), *stops}),
    )
    with _inference_mode(model), master_weights.autocast(model):
        found = in_batches(
            prompts, batch_size, lambda batch: complete(model, batch, settings, synced_gpus=with_other_ranks)
        )
    texts = tokenizer.batch_decode(found, skip_special_tokens=True)
    ended = [bool(ids[-1:] and ids[-1] in settings.eos_token_id) for ids in found]
    return list(zip(texts, ended, strict=True))


def in_batches(
    prompts: Sequence[Prompt], batch_size: int, answer: Callable[[list[Prompt]], Sequence[Answer]]
) -> list[Answer]:
    """What `answer` gives for each prompt of a batch, in the order of the prompts. Those of similar length are answered
    together, which needs little padding, the longest first, which need most memory."""
    places = sorted(range(len(prompts)), key=lambda place: len(prompts[place]), reverse=True)
    found: dict[int, Answer] = {}
    for start in range(0, len(places), batch_size):
        batch = places[start : start + batch_size]
        found |= zip(batch, answer([prompts[place] for place in batch]), strict=True)
    return [found[place] for place in range(len(prompts))]


@torch.no_grad()
def complete(model: Model, prompts: Sequence[Sequence[int]], settings: Any, **further: object) -> list[list[int]]:
    """The token ids that the model adds to each prompt of a batch, its end token included if it comes to one.

    Prompts are padded on the left, so that each is followed by its own answer; positions count from its first token.
    An answer ends where the model's positions do.

    Args:
        settings: a GenerationConfig with `pad_token_id` and a list of `eos_token_id`.
        further: arguments of transformers' `generate`, such as `streamer`.

    Raises:
        UserError: a prompt has as many tokens as the model has positions.
    """
    device = next(model.parameters()).device
    width = max(len(ids) for ids in prompts)
    table = positions.limit(model)
    if table is not None and width >= table:
        raise UserError(
            f"The prompt has {width:,} tokens, and {model.config.model_type} has a table of {table:,} positions. "
            "Shorten it."
        )
    if table is not None:
        room = table - width
        # Alone, a prompt leaves room for its own answer; a sharded model generates as often on every rank.
        if len(prompts) > 1 and (room < settings.max_new_tokens or further.get("synced_gpus")):
            return [ids for one in prompts for ids in complete(model, [one], settings, **further)]
        settings = copy.copy(settings)
        settings.max_new_tokens = min(settings.max_new_tokens, room)
    pad = settings.pad_token_id or 0  # masked, so any token will do
    padded = [[pad] * (width - len(ids)) + list(ids) for ids in prompts]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
    output = model.generate(
        input_ids=torch.tensor(padded, device=device),
        attention_mask=torch.tensor(mask, device=device),
        generation_config=settings,
        **further,
    )
    ends = set(settings.eos_token_id)
    added = []
    for ids in output[:, width:].tolist():  # an answer that ended before others of its batch is padded
        last = next((place for place, token in enumerate(ids) if token in ends or token == settings.pad_token_id), None)
        added.append(ids if last is None else ids[: last + (ids[last] in ends)])
    return added


def end_tokens(model: Model, tokenizer: Tokenizer) -> list[int]:
    """The end tokens in the model's generation config and the tokenizer's own."""
    configured = model.generation_config.eos_token_id
    configured = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in (*configured, tokenizer.eos_token_id) if token is not None})


@contextlib.contextmanager
def _inference_mode(model: Model) -> Iterator[None]:
    """Unsloth's generation mode if the model has one, else eval mode; restores the previous mode."""
    was_training = model.training
    if hasattr(model, "for_inference"):
        model.for_inference()
    else:
        model.eval()
    try:
        yield
    finally:
        if hasattr(model, "for_training"):
            model.for_training(use_gradient_checkpointing=getattr(model, "_unsloth_gradient_checkpointing", True))
        model.train(was_training)
