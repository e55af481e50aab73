"""How the inputs of a forward pass reach the device."""

from __future__ import annotations

from typing import Any

import torch

from finetune.engine.training.batches import HostTensor, to_device, unwrap_host_tensors


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
        moved = to_device(given, torch.device("meta"), packed_kernel=False)
    assert {moved[name].device.type for name in ("input_ids", "labels")} == {"meta"}
    assert moved["packed_seq_lengths"].tensor is lengths
    assert set(copies) == {(1, 8), (2, 8)} and all(one["non_blocking"] for one in copies.values())
