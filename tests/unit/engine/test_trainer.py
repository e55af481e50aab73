"""The loss hook alone, against sums worked out by hand: views, counts, and models that ignore counts."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
import trl
from transformers.training_args import OptimizerNames

from finetune.engine.trainer import SFTTrainer, _HostTensor, _unwrap_host_tensors, _with_current_field_names
from finetune.errors import UserError


class MeanModel(torch.nn.Module):
    """Returns the mean over its own labels whatever count it is given, as some forwards do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(11, 11)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **ignored: Any) -> dict[str, torch.Tensor]:
        logits = self.table(input_ids)[:, :-1].flatten(0, 1)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)}


def trainer(*, accepts: bool, world_size: int = 1, accumulation: int = 1) -> Any:
    """What the hook reads of a trainer, without a model to load."""
    fake = types.SimpleNamespace(
        model_accepts_loss_kwargs=accepts,
        stack=types.SimpleNamespace(backend="transformers", device="cpu"),
        args=types.SimpleNamespace(world_size=world_size),
        current_gradient_accumulation_steps=accumulation,
        loss_is_scaled_for_ga=None,
        load_balancing=None,
        _note_tokens=lambda outputs, inputs: None,
    )
    for hook in (SFTTrainer._token_loss, SFTTrainer._loss_of_model_that_ignores_counts, SFTTrainer._scale):
        setattr(fake, hook.__name__, types.MethodType(hook, fake))
    return fake


def batch(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Rows of tokens; a negative one is context and not supervised."""
    ids = torch.tensor([[abs(token) for token in row] for row in rows])
    labels = torch.tensor([[token if token > 0 else -100 for token in row] for row in rows])
    return {"input_ids": ids, "labels": labels}


MICRO_BATCHES = [  # of two ranks with two accumulation steps each: ragged labels, and one batch with none
    [batch([[-1, 2, 3, 4, 5]]), batch([[-1, -2, -3, 4, -5]])],
    [batch([[-1, -2, -3, -4, -5]]), batch([[-6, 7, 8, -9, 10]])],
]


@pytest.mark.parametrize("name", ["galore_adamw", "grokadamw"])  # transformers raises an ImportError, a ValueError
def test_an_optimizer_whose_package_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    package = {"galore_adamw": "galore_torch"}.get(name, name)
    monkeypatch.setattr(f"transformers.trainer_optimizer.is_{package}_available", lambda: False)
    adam = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
    args = types.SimpleNamespace(optim=OptimizerNames(name), learning_rate=1e-3, optim_args=None, **adam)
    with pytest.raises(UserError, match=f"^training.optim: {name} cannot be used here: .*install .?{package}"):
        SFTTrainer.get_optimizer_cls_and_kwargs(object.__new__(SFTTrainer), args)


@pytest.mark.parametrize(
    ("fields", "given", "expected"),
    [
        (
            "learning_rate gradient_checkpointing gradient_checkpointing_kwargs",  # transformers up to 5.17
            {"learning_rate": 1e-3, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"a": 1}},
            {"learning_rate": 1e-3, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"a": 1}},
        ),
        (
            "learning_rate activation_checkpointing activation_checkpointing_kwargs",  # from 5.18 on
            {"learning_rate": 1e-3, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"a": 1}},
            {"learning_rate": 1e-3, "activation_checkpointing": True, "activation_checkpointing_kwargs": {"a": 1}},
        ),
        (  # both, of which the old one is deprecated
            "gradient_checkpointing activation_checkpointing gradient_checkpointing_kwargs",
            {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": None},
            {"activation_checkpointing": False, "gradient_checkpointing_kwargs": None},
        ),
        (  # the user's own setting, by the new name, wins
            "activation_checkpointing gradient_checkpointing",
            {"gradient_checkpointing": True, "activation_checkpointing": False},
            {"activation_checkpointing": False},
        ),
    ],
    ids=["old names", "new names", "both names", "both given"],
)
def test_checkpointing_settings_take_the_names_that_sft_config_has(
    monkeypatch: pytest.MonkeyPatch, fields: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    monkeypatch.setattr(trl, "SFTConfig", dataclasses.make_dataclass("SFTConfig", fields.split()))
    before = dict(given)
    assert _with_current_field_names(given) == expected
    assert given == before  # the argument is not changed


def test_a_model_that_ignores_counts_gets_the_gradient_of_the_global_batch() -> None:
    model = MeanModel()
    flat = [one for rank in MICRO_BATCHES for one in rank]
    total = sum(int((one["labels"][:, 1:] != -100).sum()) for one in flat)
    reference = 0.0
    for one in flat:
        logits = model.table(one["input_ids"])[:, :-1].flatten(0, 1)
        reference = reference + torch.nn.functional.cross_entropy(
            logits, one["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
    (reference / total).backward()
    expected = model.table.weight.grad.clone()

    model.zero_grad()
    fake = trainer(accepts=False, world_size=2, accumulation=2)
    for rank in MICRO_BATCHES:
        for one in rank:
            loss = SFTTrainer.compute_loss(fake, model, one, num_items_in_batch=torch.tensor(total))
            assert torch.isfinite(loss)
            (loss / 2 / 2).backward()  # training_step divides by the accumulation, DDP by the ranks
    assert torch.allclose(model.table.weight.grad, expected, atol=1e-7)


def test_a_loss_that_is_a_view_is_cloned(monkeypatch: pytest.MonkeyPatch) -> None:
    """`loss *= world size` in place, as accelerate does, fails on the view that a fused kernel returned."""

    seen = {}

    def compute_loss(self: Any, model: Any, inputs: Any, **arguments: Any) -> tuple[torch.Tensor, Any]:
        seen.update(arguments)
        return torch.ones(1, requires_grad=True).expand(3)[0], {}

    monkeypatch.setattr(transformers.Trainer, "compute_loss", compute_loss)
    loss = SFTTrainer.compute_loss(trainer(accepts=True), None, {}, num_items_in_batch=torch.tensor(4), extra="kept")
    assert not loss._is_view()
    loss *= 2
    loss.backward()
    assert seen["extra"] == "kept" and int(seen["num_items_in_batch"]) == 4  # nothing is dropped on the way


def test_ddp_leaves_the_lengths_of_documents_on_the_host() -> None:
    """What DDP does with a forward's arguments, to a device that every build of torch has; defects C7."""
    from torch.distributed.utils import _to_kwargs

    class Model(torch.nn.Module):
        def forward(self, **kwargs: torch.Tensor) -> dict[str, torch.Tensor]:
            return kwargs

    model = Model()
    model.register_forward_pre_hook(_unwrap_host_tensors, with_kwargs=True)
    lengths = torch.tensor([3, 5])
    given = {"input_ids": torch.ones(1, 8), "packed_seq_lengths": _HostTensor(lengths)}
    (moved,) = _to_kwargs((), given, torch.device("meta"), False)[1]
    found = model(**moved)
    assert found["input_ids"].device.type == "meta" and found["packed_seq_lengths"] is lengths
    (moved,) = _to_kwargs((), {"packed_seq_lengths": lengths}, torch.device("meta"), False)[1]
    assert moved["packed_seq_lengths"].device.type == "meta"  # else all this has no reason any more


def test_the_host_waits_for_no_copy_of_a_micro_batch() -> None:
    """Copies to a device that every build of torch has: each says that it is not waited for."""
    from torch.utils._python_dispatch import TorchDispatchMode

    copies = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten._to_copy.default:
                copies[tuple(args[0].shape)] = kwargs
            return function(*args, **(kwargs or {}))

    lengths = torch.tensor([3, 5])
    given = {"input_ids": torch.ones(1, 8), "labels": torch.ones(2, 8), "packed_seq_lengths": lengths}
    fake: Any = types.SimpleNamespace(args=types.SimpleNamespace(device=torch.device("meta")), _packed_kernel=False)
    with Watch():
        moved = SFTTrainer._prepare_inputs(fake, given)
    assert {moved[name].device.type for name in ("input_ids", "labels")} == {"meta"}
    assert moved["packed_seq_lengths"].tensor is lengths
    assert set(copies) == {(1, 8), (2, 8)} and all(one["non_blocking"] for one in copies.values())


def keeper() -> Any:
    """What the trainer knows of its gradients before the first micro-batch."""
    accelerator = types.SimpleNamespace(sync_gradients=False)
    return types.SimpleNamespace(accelerator=accelerator, _gradients_in_buckets=False, _first_buckets_freed=False)


@contextlib.contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    """A process group of this process alone.

    It is never freed: torch would join gloo's threads in the destructor of the last DDP that used it, while it holds
    the interpreter's lock, which one of these threads may wait for. That test would not end.
    """
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kept", [True, False])
def test_accumulated_gradients_live_in_ddps_buckets_alone(tmp_path: Path, kept: bool) -> None:
    """Real DDP, several buckets, against the same layers without it. torch by itself holds them twice (D9)."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    alone = copy.deepcopy(layers)
    rows = torch.randn(4, 3, 5, 64)  # steps, micro-batches
    fake = keeper()
    with one_rank(tmp_path):
        model = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.03, gradient_as_bucket_view=True)
        model.zero_grad = model.zero_grad  # Unsloth gives DDP one of its own on a GPU (unsloth_zoo fast_grad_params)
        storages: list[set[int]] = []
        for step in rows:
            for place, batch in enumerate(step):
                fake.accelerator.sync_gradients = last = place == len(step) - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    if kept:
                        SFTTrainer._keep_gradients_in_buckets(fake, model)
                    model(batch).square().sum().backward()
                alone(batch).square().sum().backward()
                storages.append({p.grad.untyped_storage().data_ptr() for p in layers.parameters()})
            for own, reference in zip(layers.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(own.grad, reference.grad)
            model.zero_grad()
            alone.zero_grad()
    first, *others = storages[2:]  # the buckets, which the first step makes anew
    assert len(first) < 8  # of weights and biases of four layers
    assert all(one == first for one in others) is kept


@pytest.mark.parametrize("views, expected", [(True, [0]), (False, [2])], ids=["all weights", "adapters"])
def test_first_buckets_are_freed_after_the_first_micro_batch_that_reduces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, views: bool, expected: list[int]
) -> None:
    """Before the next one that does, in whose forward DDP makes others: once in a run (D8)."""
    freed: list[int] = []
    monkeypatch.setattr("finetune.runtime.ranks.distributed.drain_nccl_work", lambda: freed.append(place))
    fake = keeper()
    with one_rank(tmp_path):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), gradient_as_bucket_view=views)
        for place in range(6):  # two steps of three micro-batches
            fake.accelerator.sync_gradients = last = place % 3 == 2
            with contextlib.nullcontext() if last else model.no_sync():
                SFTTrainer._keep_gradients_in_buckets(fake, model)
                model(torch.ones(2, 4)).sum().backward()
                SFTTrainer._free_first_buckets(fake, model)
        SFTTrainer._free_first_buckets(fake, torch.nn.Linear(4, 4))  # one GPU: there is no DDP
    assert freed == expected
