"""What sharding costs the host: a plain FSDP2 loop on a Llama of many tiny layers, whose kernels cost next to nothing.

    torchrun --standalone --nproc_per_node 2 -m benchmarks.shard_host [--layers 32]

Prints one JSON line per way of training: milliseconds of the host per micro-batch (forward, backward) and per step
(clip, optimizer, zero_grad), and the collectives of clip and optimizer. With GPUs each rank takes one, and NCCL.

plain           not sharded; each rank for itself, gradients not averaged
sharded         norm, clipping and fused AdamW on DTensors, as the trainer has them
sharded, local  the same on each rank's parts: foreach norm and multiplication, one all-reduce, AdamW on views

On a CPU the time is that of the main thread, so neither waiting nor other work on the machine counts. On GPUs it is
the time of the calls, which return before the GPU is done.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.processes import say

WAYS = ("plain", "sharded", "sharded, local")
PHASES = ("forward", "backward", "clip", "optimizer", "zero_grad")
WARM_UP, STEPS, TOKENS, MOST = 5, 20, 24, 0.5


def main() -> None:
    """Measure each way, and print its line on rank 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    given = parser.parse_args()
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available()
    place = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if cuda else "gloo")
    for way in WAYS:
        found = measure(way, given.layers, place)
        if dist.get_rank() == 0:
            versions = {"torch": torch.__version__, "device": place.type, "ranks": dist.get_world_size()}
            say(json.dumps({"way": way, "layers": given.layers} | versions | found))
    dist.destroy_process_group()


def build(layers: int, place: torch.device, shard: bool) -> Any:
    """The model, with the policy and the units of `finetune.engine.sharding.shard`; with GPUs in bfloat16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(place, torch.bfloat16 if place.type == "cuda" else torch.float32)
    if shard:
        mesh = init_device_mesh(place.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for module in [model.model.embed_tokens, *model.model.layers]:
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_parts(parameters: list[Any]) -> torch.Tensor:
    """Norm of all ranks' parts together, and clipping, without DTensor."""
    gradients = [part(one.grad) for one in parameters]
    total = torch.stack(torch._foreach_norm(gradients)).square().sum()
    dist.all_reduce(total)
    norm = total.sqrt()
    torch._foreach_mul_(gradients, torch.clamp(MOST / (norm + 1e-6), max=1.0))
    return norm


def measure(way: str, layers: int, place: torch.device) -> dict[str, Any]:
    """Median milliseconds by phase, collectives by phase, and the norm of the first step."""
    clock = time.perf_counter if place.type == "cuda" else time.thread_time
    model = build(layers, place, shard=way != "plain")
    parameters = list(model.parameters())
    local = way == "sharded, local"
    trained = [torch.nn.Parameter(part(one.detach())) for one in parameters] if local else parameters
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    ids = torch.randint(0, 400, (1, TOKENS), generator=torch.Generator().manual_seed(dist.get_rank())).to(place)
    norm: Any = None

    def clip() -> None:
        nonlocal norm
        found = clip_parts(parameters) if local else torch.nn.utils.clip_grad_norm_(parameters, MOST)
        norm = found if norm is None else norm

    def update() -> None:
        if local:
            for own, parameter in zip(trained, parameters, strict=True):
                own.grad = part(parameter.grad)
        optimizer.step()

    times: dict[str, list[float]] = {phase: [] for phase in PHASES}
    counts: dict[str, dict[str, int]] = {}
    for step in range(WARM_UP + STEPS):
        if place.type == "cuda":
            torch.cuda.synchronize()
        marks = [clock()]
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        marks.append(clock())
        loss.backward()
        marks.append(clock())
        for name, call in (("clip", clip), ("optimizer", update)):
            if step == 0:
                with CommDebugMode() as seen:
                    call()
                counts[name] = {str(key): value for key, value in seen.get_comm_counts().items()}
            else:
                call()
            marks.append(clock())
        optimizer.zero_grad()
        model.zero_grad()
        marks.append(clock())
        if step >= WARM_UP:
            for phase, one, other in zip(PHASES, marks, marks[1:], strict=False):
                times[phase].append(other - one)
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return {
        "tensors": len(parameters),
        "milliseconds": {phase: round(1e3 * median(values), 2) for phase, values in times.items()},
        "collectives": counts,
        "first_norm": float(whole),
    }


if __name__ == "__main__":
    main()
