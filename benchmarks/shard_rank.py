"""A rank of `benchmarks.shard_gpu`: `python -m benchmarks.shard_rank [arguments of finetune.train]`.

SHARD_REQUEST in the environment is JSON with `mode` and what the mode needs. A dry run starts this program again for
slices of the model, with the same arguments.

train:  the shipped command. `cap_gib` limits the memory of this rank's GPU, `alone` shards over a single rank, too.
ops:    the copies that FSDP2 makes around an all-gather, one by one, on packed NF4 weights: which of them change bytes.
bytes:  NF4 weights before they are sharded and after the first gather, and the loss with them.
loop:   a plain training loop on a sharded model, on ranks that may share one GPU through gloo.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

STORAGE = ("bfloat16", "float16", "float32", "uint8")
ROWS, LENGTH = 4, 512  # of the batch whose loss is compared


def main() -> int:
    """Run the mode that is asked for. Returns the exit code."""
    request = json.loads(os.environ["SHARD_REQUEST"])
    if request["mode"] == "train":
        return train(request)
    found = {"ops": ops, "bytes": stored_bytes, "loop": loop}[request["mode"]](request)
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


# --- bytes ------------------------------------------------------------------------------------------------------------


def quantized(folder: str, device: Any) -> Any:
    """The model with its linear layers in NF4."""
    import torch
    from transformers import AutoModelForCausalLM

    from finetune.engine.model.load_arguments import quantization_config
    from finetune.engine.model.loading import keep_4bit_layout

    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        device_map={"": str(device)},
        quantization_config=quantization_config(4, torch.bfloat16),
    )
    keep_4bit_layout(model)
    return model.eval().requires_grad_(False)


def packed_of(model: Any) -> dict[str, Any]:
    """The packed 4-bit weights by module, as uint8 on the host."""
    import torch

    return {
        name: module.weight.data.contiguous().view(torch.uint8).flatten().cpu().clone()
        for name, module in model.named_modules()
        if type(getattr(module, "weight", None)).__name__ == "Params4bit"
    }


def batch_loss(model: Any, device: Any) -> float:
    """Loss of a fixed batch of random tokens, without gradients."""
    import torch

    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(10, model.config.vocab_size, (ROWS, LENGTH), generator=generator).to(device)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits.float()
    return float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


def changed(before: Any, after: Any) -> dict[str, Any]:
    """Bytes that differ, and the commonest 16-bit words among them; tensors of uint8 on the host."""
    import torch

    different = int((before != after).sum())
    if not different:
        return {"bytes": 0}
    old, new = (one[: one.numel() // 2 * 2].view(torch.int16) for one in (before, after))
    words = (old != new).nonzero().flatten()[:100_000]
    pairs = zip(old[words].tolist(), new[words].tolist(), strict=True)
    common = Counter(f"{a & 0xFFFF:04x} -> {b & 0xFFFF:04x}" for a, b in pairs).most_common(5)
    return {"bytes": different, "words": dict(common)}


def ops(request: dict[str, Any]) -> dict[str, Any]:
    """Each copy alone, and all of them as two ranks would make them; then the loss with what comes out."""
    import torch
    import torch.distributed.fsdp  # noqa: F401  # registers its operators

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = quantized(request["model"], device)
    packed = packed_of(model)
    modules = dict(model.named_modules())
    before = batch_loss(model, device)
    generator = torch.Generator().manual_seed(1)
    real = torch.cat(list(packed.values()))[: 2**26]
    real = real[: real.numel() // 16 * 16]
    contents = {"NF4": real, "random": torch.randint(0, 256, (real.numel(),), dtype=torch.uint8, generator=generator)}
    found: dict[str, Any] = {"loss": before, "packed_bytes": sum(one.numel() for one in packed.values())}
    for name in STORAGE:
        dtype = getattr(torch, name)
        single = {
            kind: {op: changed(raw, copied(op, raw.to(device).view(dtype)).view(torch.uint8).cpu()) for op in COPIES}
            for kind, raw in contents.items()
        }
        total = 0
        for key, raw in packed.items():
            gathered = as_two_ranks(raw.to(device).view(dtype)).view(torch.uint8)
            total += int((gathered.cpu() != raw).sum())
            modules[key].weight.data.view(torch.uint8).flatten().copy_(gathered)
        after = batch_loss(model, device)
        for key, raw in packed.items():
            modules[key].weight.data.view(torch.uint8).flatten().copy_(raw.to(device))
        found[name] = {"copies": single, "changed_bytes": total, "loss": after, "loss_change": after - before}
    found["loss_with_the_bytes_restored"] = batch_loss(model, device)
    return found


COPIES = ("clone", "copy_", "_foreach_copy_", "all_gather_copy_in", "split_with_sizes_copy", "chunk_cat")


def copied(op: str, x: Any) -> Any:
    """The one-dimensional tensor after one operator."""
    import torch

    out = torch.empty_like(x)
    half = x.numel() // 2
    if op == "clone":
        return x.clone()
    if op == "copy_":
        return out.copy_(x)
    if op == "_foreach_copy_":
        torch._foreach_copy_([out[:half], out[half:]], [x[:half], x[half:]])
    elif op == "all_gather_copy_in":
        torch.ops.fsdp.all_gather_copy_in([x[:half], x[half:]], out, [half, x.numel() - half], x.numel(), 0)
    elif op == "split_with_sizes_copy":
        parts = [out[:half].view(1, -1), out[half:].view(1, -1)]
        torch.ops.fsdp.split_with_sizes_copy(x.view(1, -1), [half, x.numel() - half], dim=1, out=parts)
    else:
        torch._chunk_cat([x], 0, 1, out=out.view(1, -1))
    return out


def as_two_ranks(x: Any) -> Any:
    """A one-dimensional tensor of even length after FSDP2's copy-in on two ranks, an all-gather and the copy-out."""
    import torch

    half = x.numel() // 2
    everywhere = torch.empty_like(x)
    for rank in (0, 1):  # each writes its own part, where the all-gather would put it
        torch.ops.fsdp.all_gather_copy_in([x[rank * half : (rank + 1) * half]], everywhere, [half], half, rank)
    out = torch.empty_like(x)
    torch.ops.fsdp.split_with_sizes_copy(everywhere.view(2, -1), [half], dim=1, out=[out.view(2, -1)])
    return out


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


def digests(tensors: dict[str, Any]) -> dict[str, str]:
    """A digest of each tensor's bytes."""
    return {name: hashlib.blake2b(one.numpy().tobytes(), digest_size=16).hexdigest() for name, one in tensors.items()}


def stored_bytes(request: dict[str, Any]) -> dict[str, Any]:
    """For each storage type: NF4 weights sharded by the engine, gathered once, and compared; the loss with them."""
    import torch
    from torch import nn

    from finetune.engine.sharding import shard

    device, mesh = start(request)
    found: dict[str, Any] = {"ranks": mesh.size(), "backend": request["backend"]}
    for name in STORAGE:
        dtype = getattr(torch, name)
        model = quantized(request["model"], device)
        packed = packed_of(model)
        plain = batch_loss(model, device)
        for key, module in model.named_modules():
            if key in packed:
                state = module.weight.quant_state
                module.quant_state, module.quant_storage = state, dtype
                module.weight = nn.Parameter(packed[key].to(device).view(dtype).view(-1, 1), requires_grad=False)
        for parameter in model.parameters():  # one type for a whole unit, as guides have it
            if dtype.is_floating_point and parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
        try:
            shard.apply(model, mesh, torch.float32)  # no cast
            for module in shard.fsdp_modules(model):
                module.unshard()
            modules = dict(model.named_modules())
            gathered = {
                key: modules[key].weight.detach().contiguous().view(torch.uint8).flatten().cpu().clone()
                for key in packed
            }
            shard.reshard(model)
            one, other = digests(packed), digests(gathered)
            found[name] = {
                "weights": len(packed),
                "bytes": sum(raw.numel() for raw in packed.values()),
                "different_digests": sum(one[key] != other[key] for key in packed),
                "changed_bytes": sum(int((packed[key] != gathered[key]).sum()) for key in packed),
                "loss_before_sharding": plain,
            }
            found[name]["loss_sharded"] = batch_loss(model, device)
        except Exception as error:  # one type that is not supported says nothing about the others
            found[name] = found.get(name, {}) | {"error": f"{type(error).__name__}: {error}"[:500]}
        del model
    return found


# --- a plain loop -----------------------------------------------------------------------------------------------------


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
