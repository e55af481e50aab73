"""Passes over given rows on this device: the most memory that they need, how long they take, and what they keep."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from finetune.data.layout import Layout
from finetune.engine.training.schedule import set_learning_rate
from finetune.measure.held import Memory
from finetune.runtime.types import JsonObject

if TYPE_CHECKING:
    from finetune.engine.training.trainer import SFTTrainer


@dataclass(frozen=True, kw_only=True)
class Passes:
    """What forward and backward passes on one micro-batch took: the most memory, and the seconds of the last and of the
    first, which compiles."""

    peak_bytes: float
    seconds: float
    first_seconds: float


def longest_rows(layout: Layout, count: int) -> np.ndarray:
    """Indices of the `count` longest rows, int64 [count]; repeated if there are fewer rows."""
    return np.resize(layout.largest_first(), count)


def batch_of(trainer: SFTTrainer, layout: Layout, rows: np.ndarray) -> tuple[JsonObject, torch.Tensor]:
    """The micro-batch of these rows, int64 [per_device], on the host, and the number of its label tokens, at least 1,
    on the device."""
    batch = trainer.collate_rows(layout.__getitems__(rows.tolist()), pack_length=layout.packs.pack_length)
    return batch, _count(trainer, int(layout.label_tokens[rows].sum()))


def _count(trainer: SFTTrainer, label_tokens: int) -> torch.Tensor:
    return torch.tensor(max(label_tokens, 1), device=trainer.args.device)


def on_document(trainer: SFTTrainer, layout: Layout, tokens: int, memory: Memory, passes: int) -> Passes | None:
    """Passes on one document of so many tokens, made of the longest of the job's, as `run_passes`."""
    row = int(layout.largest_first()[0])
    ids, labels = max(layout[row], key=lambda document: len(document[0]))
    document = np.resize(ids, tokens), np.resize(labels, tokens)
    packed = layout.packs.pack_length is not None
    batch = trainer.collate_rows([[document]], pack_length=tokens if packed else None)
    with _unsloth_length(trainer.model, tokens):
        return run_passes(trainer, batch, _count(trainer, int((document[1][1:] >= 0).sum())), memory, passes)


def run_passes(
    trainer: SFTTrainer, batch: JsonObject, count: torch.Tensor, memory: Memory, passes: int
) -> Passes | None:
    """Run forward and backward on a micro-batch `passes` times: from the second on while the gradients of the first are
    held, as under accumulation. Gradients are freed afterwards, even if memory ran out; the generators of random
    numbers are put back. Returns None if memory ran out."""
    free_gradients(trainer)
    memory.reset()
    seconds: list[float] = []
    full = False
    model = trainer.model_wrapped
    assert model is not None  # as it is before `train`
    with same_random_numbers(trainer):
        try:
            for _ in range(passes):
                synchronize(trainer)
                began = time.perf_counter()
                trainer.training_step(model, dict(batch), count)
                synchronize(trainer)
                seconds.append(time.perf_counter() - began)
        except torch.OutOfMemoryError:
            full = True
    peak = memory.peak_bytes()
    free_gradients(trainer)
    return None if full else Passes(peak_bytes=peak, seconds=seconds[-1], first_seconds=seconds[0])


@contextlib.contextmanager
def same_random_numbers(trainer: SFTTrainer) -> Iterator[None]:
    """Context after which the generators, from which dropout draws, are as before."""
    with torch.random.fork_rng([torch.cuda.current_device()] if trainer.args.device.type == "cuda" else []):
        yield


def free_gradients(trainer: SFTTrainer) -> None:
    """Free the gradients, and forget what passes outside of a step have left in the trainer."""
    trainer.model.zero_grad(set_to_none=True)
    trainer.statistics.forget()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize(trainer: SFTTrainer) -> None:
    """Wait for the trainer's GPU, if it has one."""
    if trainer.args.device.type == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def _unsloth_length(model: object, tokens: int) -> Iterator[None]:
    """Context in which Unsloth's model takes rows of so many tokens: it cuts longer ones than it was loaded for."""
    found = [
        module
        for module in getattr(model, "modules", list)()
        if isinstance(length := vars(module).get("max_seq_length"), int) and length < tokens
    ]
    before = [module.max_seq_length for module in found]
    for module in found:
        module.max_seq_length = tokens
    try:
        yield
    finally:
        for module, length in zip(found, before, strict=True):
            module.max_seq_length = length


# --- what a forward pass keeps, and what always stays --------------------------------------------------------------


def saved_bytes(trainer: SFTTrainer, layout: Layout, per_device: int) -> int:
    """Bytes that a forward pass on the longest rows keeps for the backward pass, without the parameters: what autograd
    saves, each storage once. With checkpointing these are the inputs of the checkpointed parts."""
    batch, count = batch_of(trainer, layout, longest_rows(layout, per_device))
    own = {parameter.untyped_storage().data_ptr() for parameter in trainer.model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), trainer.compute_loss_context_manager():
        model = trainer.model_wrapped
        assert model is not None  # as it is before `train`
        loss = trainer.compute_loss(model, trainer._prepare_inputs(batch), num_items_in_batch=count)
    found = sum(storage.nbytes() for storage in kept.values())
    del loss
    kept.clear()
    free_gradients(trainer)
    return found


def saved_bytes_without_checkpointing(trainer: SFTTrainer, layout: Layout, per_device: int) -> int | None:
    """The same if nothing is recomputed in the backward pass; None if that does not fit on the device."""
    on = [module for module in trainer.model.modules() if getattr(module, "gradient_checkpointing", False)]
    try:
        for module in on:
            module.gradient_checkpointing = False
        return saved_bytes(trainer, layout, per_device)
    except torch.OutOfMemoryError:
        free_gradients(trainer)
        return None
    finally:
        for module in on:
            module.gradient_checkpointing = True


def training_state_fits(trainer: SFTTrainer) -> bool:
    """Whether weights, gradients and the optimizer state fit on the device together, without any activations.
    Afterwards weights and optimizer state remain allocated, as in training, even if no step was completed before.

    The weights are not changed: gradients are zero, and so is the learning rate.
    """
    assert trainer.optimizer is not None
    for group in trainer.optimizer.param_groups:
        set_learning_rate(group, 0.0)
    try:
        for parameter in trainer.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        # The inner optimizer: accelerate's wrapper skips all but the last micro-batch of a step.
        getattr(trainer.optimizer, "optimizer", trainer.optimizer).step()
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        free_gradients(trainer)
