"""A rank of `benchmarks.shard_gpu`: `python -m benchmarks.shard_rank [arguments of finetune.train]`.

SHARD_REQUEST in the environment is JSON with `mode` and what the mode needs. A dry run starts this program again for
slices of the model, with the same arguments.

train:  the shipped command. `cap_gib` limits the memory of this rank's GPU, `alone` shards over a single rank, too.
loop:   a plain training loop on a sharded model, on ranks that may share one GPU through gloo.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> int:
    """Run the mode that is asked for. Returns the exit code."""
    request = json.loads(os.environ["SHARD_REQUEST"])
    if request["mode"] == "train":
        return train(request)
    found = loop(request)
    if int(os.environ.get("RANK", "0")) == 0:
        Path(request["out"]).write_text(json.dumps(found))
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0


def train(request: dict[str, Any]) -> int:
    """`finetune.train` under a cap of memory."""
    import torch

    from finetune import train as program
    from finetune.engine.sharding import shard

    if request.get("cap_gib") and torch.cuda.is_available():
        place = int(os.environ.get("LOCAL_RANK", "0"))
        total = torch.cuda.get_device_properties(place).total_memory
        torch.cuda.set_per_process_memory_fraction(min(request["cap_gib"] * 2**30 / total, 1.0), place)
    if request.get("alone"):
        shard.is_requested = lambda config: config.training.strategy == "shard"
    return program.main(sys.argv[1:])


def start(request: dict[str, Any]) -> tuple[Any, Any]:
    """The device of this rank, and a mesh of all ranks in a new process group."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    cuda = torch.cuda.is_available()
    place = int(os.environ["LOCAL_RANK"]) % max(torch.cuda.device_count(), 1)
    if cuda:
        torch.cuda.set_device(place)
    dist.init_process_group(request["backend"])
    kind = "cuda" if cuda else "cpu"
    return torch.device(kind, place) if cuda else torch.device(kind), init_device_mesh(kind, (dist.get_world_size(),))


def loop(request: dict[str, Any]) -> dict[str, Any]:
    """Full fine-tuning with AdamW on fixed random rows: losses, and what each rank holds, predicted and measured."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForCausalLM

    from finetune.engine.sharding import shard

    device, mesh = start(request)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=dtype)
    model.config.use_cache = False
    elements = sum(one.numel() for one in model.parameters())
    if request["sharded"]:
        shard.apply(model, mesh, dtype)
        for module in shard.fsdp_modules(model):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no average
    model.to(device).train().gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(10, model.config.vocab_size, (request["rows"], request["length"]), generator=generator)
    own = rows.chunk(ranks)[rank].to(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    losses, seconds = [], []
    for _ in range(request["steps"]):
        began = time.perf_counter()
        logits = model(input_ids=own).logits.float()
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), own[:, 1:].flatten())
        loss.backward()
        del logits
        optimizer.step()
        held = held_bytes(model, optimizer)
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / ranks)
        seconds.append(time.perf_counter() - began)
    mine = {
        "held_bytes": held,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        "after_gib": torch.cuda.memory_allocated() / 2**30 if device.type == "cuda" else None,
        "split": sum(isinstance(one, DTensor) for one in model.parameters()),
    }
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, mine)
    return {"ranks": ranks, "parameters": elements, "bytes_of_one": dtype.itemsize, "losses": losses,
            "seconds": seconds, "per_rank": everyone}  # fmt: skip


def held_bytes(model: Any, optimizer: Any) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state on this rank."""
    import torch
    from torch.distributed.tensor import DTensor

    def local(one: Any) -> int:
        return (one.to_local() if isinstance(one, DTensor) else one).nbytes

    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return {
        "parameters": sum(local(one) for one in parameters),
        "gradients": sum(local(one.grad) for one in parameters if one.grad is not None),
        "optimizer": sum(local(one) for one in states),
    }


if __name__ == "__main__":
    raise SystemExit(main())
