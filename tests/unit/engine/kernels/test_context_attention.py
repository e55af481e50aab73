"""Rows that several ranks share, against each document alone on one rank. The ranks are threads."""

from __future__ import annotations

import copy
import functools
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.attention import varlen

from finetune.config import load
from finetune.data.collate import collate
from finetune.data.layout import Document
from finetune.data.packs import MULTIPLE
from finetune.engine.kernels import attention, context_attention
from finetune.engine.kernels.context_attention import Heads, deal_heads
from finetune.engine.model import packing, trial
from finetune.engine.monitoring import token_statistics
from finetune.engine.training.batches import own_part, targets, to_device
from finetune.engine.training.loss import loss_of_part
from finetune.errors import UserError
from finetune.runtime.ranks.context_group import ContextGroup, StandIn
from tests.helpers import tiny
from tests.helpers.config import MODEL
from tests.unit.engine.kernels.test_attention import of_each_document

VOCABULARY = 64


@dataclass(frozen=True, kw_only=True)
class Threads(ContextGroup):
    """Ranks as threads of one process."""

    barrier: Any
    places: Any
    own: Any

    @property
    def part(self) -> int:
        return self.own.part

    def _gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        self.places[self.part] = value
        self.barrier.wait()
        found = list(self.places)
        self.barrier.wait()
        return found

    def exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.shape[0] == self.size
        return torch.stack([sent[self.part].clone() for sent in self._gather(tensor)])

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._gather(tensor.clone())).sum(0)


def threads(size: int) -> Threads:
    barrier = threading.Barrier(size, timeout=60)
    return Threads(size=size, barrier=barrier, places=[None] * size, own=threading.local())


def on_all(group: Threads, work: Callable[[int], Any]) -> list[Any]:
    """What each rank returns. An error comes from the rank that had it, not from those that wait for it."""

    def rank(part: int) -> Any:
        group.own.part = part
        try:
            return work(part)
        except BaseException:
            group.barrier.abort()
            raise

    # Threads share the stance that the trial of packs sets: the last one may leave another's behind.
    with torch.compiler.set_stance("default"), ThreadPoolExecutor(group.size) as pool:
        found = [pool.submit(rank, part) for part in range(group.size)]
    errors = [one.exception() for one in found]
    for error in sorted(filter(None, errors), key=lambda one: isinstance(one, threading.BrokenBarrierError)):
        raise error
    return [one.result() for one in found]


@pytest.mark.parametrize(
    ("query", "key_value", "ranks", "expected"),
    [
        (12, 2, 2, Heads(query=12, key_value=2, repeats=1)),
        (12, 2, 4, Heads(query=12, key_value=4, repeats=2)),
        (9, 3, 2, Heads(query=10, key_value=10, repeats=3)),
        (32, 8, 8, Heads(query=32, key_value=8, repeats=1)),
        (14, 2, 4, Heads(query=16, key_value=16, repeats=7)),
        (8, 1, 8, Heads(query=8, key_value=8, repeats=8)),
        (2, 2, 4, Heads(query=4, key_value=4, repeats=1)),
        (6, 6, 1, Heads(query=6, key_value=6, repeats=1)),
    ],
)
def test_few_heads_are_repeated_and_fewer_are_added(query: int, key_value: int, ranks: int, expected: Heads) -> None:
    assert deal_heads(query, key_value, ranks) == expected


def model(heads: int, key_value: int, window: int | None) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=key_value,
        head_dim=8,
        max_position_embeddings=128,
        use_sliding_window=window is not None,
        sliding_window=window,
        max_window_layers=1,
    )
    return transformers.AutoModelForCausalLM.from_config(config).train()


def documents(*lengths: int) -> list[Document]:
    """Of random tokens, with a prompt of two that is masked."""
    found = []
    for seed, length in enumerate(lengths):
        ids = np.random.default_rng(seed).integers(0, VOCABULARY, length).astype(np.int32)
        labels = ids.copy()
        labels[:2] = -100
        found.append((ids, labels))
    return found


def alone(whole: Any, rows: list[list[Document]]) -> tuple[float, list[float], dict[str, torch.Tensor]]:
    """A loop over documents in plain PyTorch: the loss per supervised token, of each document, and the gradient."""
    total = sum(int((labels[1:] != -100).sum()) for row in rows for _, labels in row)
    losses, each = [], []
    for ids, labels in (document for row in rows for document in row):
        logits = whole(input_ids=torch.tensor(ids)[None].long()).logits[0, :-1]
        chosen = torch.tensor(labels).long()[1:]
        token = torch.nn.functional.cross_entropy(logits, chosen, ignore_index=-100, reduction="none")
        losses.append(token.sum() / total)
        each += [token.detach().sum().item() / int((chosen != -100).sum())] if (chosen != -100).any() else []
    loss = torch.stack(losses).sum()
    loss.backward()
    return loss.item(), each, {name: one.grad for name, one in whole.named_parameters()}


@pytest.mark.parametrize(
    ("heads", "key_value", "ranks", "window", "pack_length", "kernel"),
    [
        pytest.param(4, 2, 2, None, 64, False, id="packs"),
        pytest.param(9, 3, 2, None, None, False, id="heads that 2 does not divide"),
        pytest.param(6, 1, 4, 7, 64, False, id="one key/value head, sliding window"),
        pytest.param(6, 3, 2, None, 64, True, id="kernel of a GPU"),
    ],
)
def test_shared_rows_are_as_each_document_alone(
    heads: int,
    key_value: int,
    ranks: int,
    window: int | None,
    pack_length: int | None,
    kernel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loss, gradients and each document's loss. Documents of one token, and some that begin, end or lie across the
    border between two ranks; activations are recomputed."""
    if kernel:
        monkeypatch.setattr(varlen, "varlen_attn", of_each_document)
        monkeypatch.setattr(context_attention, "document_attention", attention.packed_attention)
    rows = [documents(30, 2, 13, 1), documents(33, 17), []]
    plain = model(heads, key_value, window)
    loss, of_documents, gradients = alone(plain, rows)
    group = threads(ranks)
    shared = model(heads, key_value, window)
    context_attention.install(shared, group)
    tiny.checkpoint_activations(shared)
    copies = [copy.deepcopy(shared) for _ in range(ranks)]
    total = torch.tensor(sum(int((labels[1:] != -100).sum()) for row in rows for _, labels in row))

    def rank(part: int) -> tuple[float, list[float], int]:
        batch = collate(rows, pad_token_id=0, pack_length=pack_length, multiple=ranks * MULTIPLE)
        batch = own_part(batch, group)
        batch.pop("document_lengths")
        inputs = to_device(batch, torch.device("cpu"), attention.batch_arguments)
        own, outputs = loss_of_part(copies[part], inputs, total)
        own.backward()
        found = token_statistics.from_outputs(outputs, targets(inputs))
        assert found is not None
        return own.item(), token_statistics.document_losses(found, inputs, group).tolist(), inputs["input_ids"].shape[1]

    found = on_all(group, rank)
    assert sum(own for own, _, _ in found) == pytest.approx(loss, rel=1e-6)
    assert len({tokens for _, _, tokens in found}) == 1
    assert found[0][1] == pytest.approx(of_documents, rel=1e-5) and not any(losses for _, losses, _ in found[1:])
    for name, expected in gradients.items():
        summed = sum(dict(one.named_parameters())[name].grad for one in copies)
        assert torch.allclose(summed, expected, atol=1e-6, rtol=1e-4), name  # type: ignore[arg-type]


@pytest.mark.parametrize(("heads", "key_value", "ranks"), [(4, 2, 2), (6, 1, 4)])
def test_a_stand_in_computes_as_much_as_each_rank(
    heads: int, key_value: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [documents(30, 2, 13, 1), documents(33, 17)]
    work: dict[str, list] = {}  # what each does, in order
    compute: Any = context_attention.document_attention

    def attend(module: Any, *states: torch.Tensor, **given: Any) -> Any:
        work[module.name].append([tuple(state.shape) for state in states if state is not None])
        return compute(module, *states, **given)

    monkeypatch.setattr(context_attention, "document_attention", attend)

    def run(name: str, one: Any, group: ContextGroup) -> int:
        work[name] = []
        for layer in one.model.layers:
            layer.self_attn.name = name
        batch = collate(rows, pad_token_id=0, pack_length=64, multiple=ranks * MULTIPLE)
        batch = own_part(batch, group)
        batch.pop("document_lengths")
        inputs = to_device(batch, torch.device("cpu"), attention.batch_arguments)
        loss_of_part(one, inputs, torch.tensor(1))[0].backward()
        return int((inputs["shift_labels"] != -100).sum())

    group, alone = threads(ranks), StandIn(size=ranks)
    copies = [model(heads, key_value, None) for _ in range(ranks + 1)]
    context_attention.install(copies[0], group)
    for one in copies[1:ranks]:
        one.set_attn_implementation(context_attention.NAME)
    labels = on_all(group, lambda part: run(str(part), copies[part], group))
    context_attention.install(copies[-1], alone)
    assert run("alone", copies[-1], alone) == max(labels)  # the part with the most
    assert work["alone"] == work["0"] and len(work["alone"]) == 2


@pytest.mark.parametrize(("heads", "ranks"), [(4, 4), (3, 2)])
def test_the_output_is_contiguous(heads: int, ranks: int) -> None:
    """As that of every attention of transformers: some layers call `view` on it (AFMoE)."""
    own = -(-heads // ranks)
    assert context_attention.gather_heads(torch.ones(2 * ranks, own, 8), heads, StandIn(size=ranks)).is_contiguous()


def test_rows_without_bounds_are_computed_as_before() -> None:
    """As in generation, in which each rank has its own prompts."""
    plain, shared = model(4, 2, None), model(4, 2, None)
    context_attention.install(shared, threads(2))
    ids = torch.arange(10)[None]
    assert torch.allclose(shared(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-6)


def test_a_model_whose_attention_cannot_be_shared_is_refused() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    for family, changes, expected in (
        ("GptOss", {}, "has attention sinks"),
        ("DeepseekV3", {}, "value heads of deepseek_v3 are of another width"),
        ("Qwen3Moe", {"attention_dropout": 0.1}, "has attention_dropout 0.1"),
        ("Llama4Text", {}, "attends within chunks of a row"),
        ("Doge", {"num_experts": 0}, "attends to the tokens that it chooses"),
        ("Qwen3Moe", {"rope_parameters": dynamic}, "rotary embeddings of qwen3_moe depend on how long rows are"),
        ("Qwen2Moe", {"use_sliding_window": True, "max_window_layers": 1}, "has its sliding window in the mask alone"),
        ("GPT2", {"n_inner": 16, "n_head": 2}, "has attn_pdrop 0.1"),
    ):
        why = context_attention.why_not_shared(tiny.make_moe(family, **changes), torch.float32)
        assert why is not None and expected in why
    assert context_attention.why_not_shared(tiny.make_moe("Qwen3Moe"), torch.float32) is None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"softcap": 50.0}, "softcap"),
        ({"indices": torch.ones(1)}, "indices"),
        ({"attention_mask": torch.ones(1, 1, 4, 8)}, "a mask of its own"),
        ({"dropout": 0.1}, "dropout"),
    ],
)
def test_an_attention_with_more_than_queries_keys_and_values_is_refused(given: dict, named: str) -> None:
    """Which only its call shows, in a model of an unknown kind."""
    heads = torch.ones(1, 2, 4, 8)
    arguments = attention.batch_arguments(torch.tensor([8], dtype=torch.int32), torch.device("cpu")) | given
    with pytest.raises(UserError, match=f"^training.context_parallel is 2, but this model's attention has {named},"):
        context_attention.context_attention(threads(2), torch.nn.Identity(), heads, heads, heads, **arguments)


def test_a_model_that_mixes_tokens_outside_of_its_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by trying it: here its first layer adds to each token the one before."""
    monkeypatch.setattr(packing, "_tried", lambda *_: trial.Separation(leak=None))  # as if not across documents

    def mix(module: Any, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        return output + output.roll(1, dims=1)

    stack: Any = types.SimpleNamespace(backend="transformers", device="cpu")
    config = load([*MODEL, "--model.dtype", "float32"])
    for mixes in (False, True):
        group = threads(2)
        copies = [model(4, 2, None) for _ in range(3)]
        for one in copies if mixes else []:
            one.model.embed_tokens.register_forward_hook(mix)

        def rank(part: int, copies: list[Any] = copies, group: Threads = group) -> None:
            packing.prepare_for_shared_rows(copies[part], config, stack, group)

        def dry_run(copies: list[Any] = copies) -> None:
            packing.prepare_for_shared_rows(copies[2], config, stack, StandIn(size=2))

        for attempt in (functools.partial(on_all, group, rank), dry_run):
            if not mixes:
                attempt()
                continue
            message = "^training.context_parallel is 2, .*qwen3 gives other logits for a part"
            with pytest.raises(UserError, match=message):
                attempt()


def test_a_mixture_that_was_saved_to_balance_its_load_is_tried_without() -> None:
    """transformers would compute that loss over the tokens of whole rows."""
    stack: Any = types.SimpleNamespace(backend="transformers", device="cpu")
    config, group = load([*MODEL, "--model.dtype", "float32"]), threads(2)
    copies = [tiny.make_moe("Qwen3Moe", output_router_logits=True) for _ in range(2)]
    on_all(group, lambda part: packing.prepare_for_shared_rows(copies[part], config, stack, group))


def test_a_kernel_is_timed_at_the_heads_of_one_rank() -> None:
    shapes = attention.AttentionShapes(heads=12, key_value_heads=2, head_dim=8, lengths=(5,), dtype=torch.bfloat16)
    found = context_attention.own_shapes(shapes, 4)
    assert (found.heads, found.key_value_heads, found.lengths) == (3, 1, (5,))
