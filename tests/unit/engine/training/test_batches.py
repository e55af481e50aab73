"""How the inputs of a forward pass reach the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from finetune.data.collate import collate
from finetune.engine.training.batches import HostTensor, own_part, targets, to_device, unwrap_host_tensors
from finetune.runtime.ranks.context_group import ContextGroup


@dataclass(frozen=True, kw_only=True)
class Part(ContextGroup):
    """One of the ranks that share a row."""

    at: int

    @property
    def part(self) -> int:
        return self.at


def test_ddp_leaves_the_lengths_of_documents_on_the_host() -> None:
    """What DDP does with a forward's arguments, to a device that every build of torch has; defects C7."""
    from torch.distributed.utils import _to_kwargs

    class Model(torch.nn.Module):
        def forward(self, **kwargs: torch.Tensor) -> dict[str, torch.Tensor]:
            return kwargs

    model = Model()
    model.register_forward_pre_hook(unwrap_host_tensors, with_kwargs=True)
    lengths = torch.tensor([3, 5])
    given = {"input_ids": torch.ones(1, 8), "packed_seq_lengths": HostTensor(lengths)}
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
    with Watch():
        moved = to_device(given, torch.device("meta"), lambda lengths, device: {"packed_seq_lengths": lengths})
    assert {moved[name].device.type for name in ("input_ids", "labels")} == {"meta"}
    assert moved["packed_seq_lengths"].tensor is lengths
    assert set(copies) == {(1, 8), (2, 8)} and all(one["non_blocking"] for one in copies.values())


def test_parts_of_a_row_are_the_row() -> None:
    """Positions go on across the border between two ranks, the last label of a part is the first of the next, and
    every rank has the bounds of the whole row."""
    documents = [(np.arange(first, first + length, dtype=np.int32),) * 2 for first, length in ((10, 5), (20, 14))]
    whole = collate([documents[:1], documents[1:], []], pad_token_id=0, pack_length=None, multiple=16)
    labels = whole["labels"][0].tolist()
    assert whole["packed_seq_lengths"].tolist() == [5, 14, 13]
    assert labels == [-100, *range(11, 15), -100, *range(21, 34), *[-100] * 13]
    parts = [own_part(whole, Part(size=2, at=place)) for place in (0, 1)]
    for name in ("input_ids", "position_ids", "labels"):
        assert torch.cat([part[name] for part in parts], dim=1).equal(whole[name]), name
    assert parts[1]["position_ids"][0, :3].tolist() == [11, 12, 13]
    predicted = torch.cat([targets(part)[0] for part in parts])
    assert predicted.tolist() == [*labels[1:], -100] and predicted[15] == labels[16] == 31
    assert [part["packed_seq_lengths"].tolist() for part in parts] == [[5, 14, 13]] * 2
    assert [part["document_lengths"].tolist() for part in parts] == [[5, 11], [3, -13]]
    assert targets({"labels": whole["labels"]}).tolist() == [labels[1:]]


def test_a_row_of_nothing_is_shared_as_well() -> None:
    """Of dummy rows, which keep the ranks' collectives aligned."""
    for pack_length in (None, 40):
        whole = collate([[], []], pad_token_id=0, pack_length=pack_length, multiple=48)
        assert whole["input_ids"].shape == (1, 48 if pack_length is None else 96)
        assert int(whole["packed_seq_lengths"].sum()) == whole["input_ids"].shape[1]
        assert (own_part(whole, Part(size=2, at=1))["shift_labels"] == -100).all()


def test_a_long_row_alone_has_no_padding() -> None:
    """With a masked token, transformers would write a mask of all tokens by all tokens: 40 GB for 200,001."""

    def mask(*lengths: int) -> torch.Tensor:
        rows = [[(np.ones(length, dtype=np.int32),) * 2] for length in lengths]
        return collate(rows, pad_token_id=0, pack_length=None)["attention_mask"]

    assert mask(200_001).shape == (1, 200_001) and mask(200_001).all()
    assert mask(33_001, 5).shape == (2, 33_008) and mask(13).shape == (1, 16)
