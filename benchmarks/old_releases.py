"""The fused loss of old unsloth_zoo releases, as published, without and with the patches.

    pip download --no-deps unsloth_zoo==2026.4.9 --dest wheels
    unzip -q wheels/unsloth_zoo-2026.4.9-*.whl -d zoo-2026.4.9
    python -m benchmarks.old_releases zoo-2026.4.9 [...]

Prints one line of JSON per release, each measured in a process of its own with the installed torch, on the GPU if there
is one, then in two DDP ranks (NCCL where there are two GPUs, else gloo) on rows of unlike length. Only the file of the
loss and what it imports are loaded: whole old releases ask for other versions of transformers and trl, and for a GPU.
The reference is torch's cross entropy of the same logits, in one process.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

WORLD_SIZE = 2  # the factor by which transformers multiplies the loss of a rank


def load(folder: Path) -> types.ModuleType:
    """Import the loss of the release unpacked in `folder`, without running the `__init__` of its packages."""
    from patches.unsloth_fused_loss_view import MODULE

    for name in ("unsloth_zoo", "unsloth_zoo.fused_losses", "unsloth_zoo.temporary_patches"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package
    device = types.ModuleType("unsloth_zoo.device_type")  # the release's own raises where there is no GPU
    device.DEVICE_TYPE = "cuda"  # type: ignore[attr-defined]
    sys.modules[device.__name__] = device
    os.environ["UNSLOTH_CE_LOSS_TARGET_GB"] = "1"  # else they ask the GPU for its free memory, by way of other modules
    return importlib.import_module(MODULE)


def measure(module: types.ModuleType, torch_compile: bool) -> dict[str, Any]:
    """What happens to `loss *= WORLD_SIZE`, and the gradient of the scaled loss over the one that is right."""
    import torch

    from patches.unsloth_fused_loss_view import small_loss

    loss, _, _ = small_loss(module)
    try:
        loss *= WORLD_SIZE
        in_place = "works"
    except RuntimeError as error:
        in_place = str(error)

    _, hidden, head = small_loss(module)
    labels = torch.arange(24, device=hidden.device).reshape(2, 12)
    logits = (hidden @ head.T)[:, :-1].reshape(-1, len(head))
    reference = WORLD_SIZE * torch.nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1))
    right = torch.autograd.grad(reference, (hidden, head))
    loss = module.unsloth_fused_ce_loss(
        trainer=None,
        hidden_states=hidden,
        lm_head_weight=head,
        lm_head_bias=None,
        labels=labels,
        torch_compile=torch_compile,
    )
    scaled = WORLD_SIZE * loss
    own = torch.autograd.grad(scaled, (hidden, head))
    first, second = (torch.cat([part.flatten() for part in parts]).double() for parts in (own, right))
    return {
        "in_place": in_place,
        "loss_over_reference": float(scaled.detach() / reference.detach()),
        "gradient_over_reference": float(first.norm() / second.norm()),
        "cosine": float(first @ second / first.norm() / second.norm()),
    }


def under_ddp(module: types.ModuleType) -> dict[str, Any]:
    """The error of a training step as transformers takes it (loss *= world size, DDP's mean), or its gradient over the
    right one; then the same with the loss cloned by hand, as guides for several GPUs have it."""
    import torch
    import torch.distributed as dist

    rank, device = dist.get_rank(), "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    ids = torch.randint(64, (WORLD_SIZE, 12), device=device)
    labels = torch.where(torch.arange(12, device=device) < torch.tensor([[4], [11]], device=device), ids, -100)
    count = (labels[:, 1:] != -100).sum()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64, bias=False)

        def forward(self, rows: slice, fused: bool) -> torch.Tensor:
            hidden = self.body(ids[rows])
            if not fused:
                logits = self.head(hidden)[:, :-1].reshape(-1, 64)
                return torch.nn.functional.cross_entropy(logits, labels[rows][:, 1:].reshape(-1))
            return module.unsloth_fused_ce_loss(
                trainer=None,
                hidden_states=hidden,
                lm_head_weight=self.head.weight,
                lm_head_bias=None,
                labels=labels[rows],
                n_items=count,
                torch_compile=False,
            )

    def gradient() -> torch.Tensor:
        found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double()
        model.zero_grad()
        return found

    model = Model().to(device)
    model(slice(None), False).backward()
    right = gradient()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    record: dict[str, Any] = {}
    for name in ("as transformers does it", "cloned by hand"):
        loss = wrapped(slice(rank, rank + 1), True)
        try:
            loss = loss.clone() if name == "cloned by hand" else loss
            loss *= WORLD_SIZE
        except RuntimeError as error:
            record[name] = {"error": str(error).split(".")[0]}
            loss.sum().backward()  # let DDP finish what the forward began
            model.zero_grad()
            continue
        loss.backward()
        own = gradient()
        record[name] = {
            "gradient_over_reference": float(own.norm() / right.norm()),
            "cosine": float(own @ right / own.norm() / right.norm()),
        }
    return record


def ranks(folder: Path) -> dict[str, Any]:
    """What `--ranks` adds to the record, measured by two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(WORLD_SIZE)]
    command += ["-m", "benchmarks.old_releases", "--rank", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": (done.stderr + done.stdout)[-2000:]}
    return json.loads(done.stdout.splitlines()[-1])


def one_rank(folder: Path) -> None:
    """A process that `ranks` started."""
    import torch
    import torch.distributed as dist

    import patches
    from patches import core

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    module = load(folder)
    record = {"backend": dist.get_backend(), "without_patches": under_ddp(module)}
    core.run(patches.LATE)
    record["with_patches"] = under_ddp(module)
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(record) + "\n")
    dist.destroy_process_group()


def one(folder: Path) -> dict[str, Any]:
    """The record of one release."""
    import torch

    import patches
    from patches import core

    compile_chunks = torch.cuda.is_available()  # a CPU needs a C++ compiler for that, and half a minute
    module = load(folder)
    record: dict[str, Any] = {
        "unsloth_zoo": next(iter(importlib.metadata.distributions(path=[str(folder)]))).version,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "world_size": WORLD_SIZE,
        "without_patches": measure(module, compile_chunks),
    }
    record["applied"] = [verdict.name for verdict in core.run(patches.LATE) if verdict.applied]
    record["with_patches"] = measure(module, compile_chunks)
    record["applied_again"] = [verdict.name for verdict in core.run(patches.LATE) if verdict.applied]
    if not torch.cuda.is_available() or torch.cuda.device_count() >= WORLD_SIZE:
        record["ddp"] = ranks(folder)
    return record


def main() -> int:
    """Measure the releases given as folders."""
    if sys.argv[1:2] == ["--rank"]:
        one_rank(Path(sys.argv[2]).resolve())
        return 0
    if len(sys.argv) == 2:
        sys.stdout.write(json.dumps(one(Path(sys.argv[1]).resolve())) + "\n")
        return 0
    codes = [
        subprocess.run([sys.executable, "-m", "benchmarks.old_releases", folder], check=False).returncode
        for folder in sys.argv[1:]
    ]
    return max(codes, default=2)


if __name__ == "__main__":
    raise SystemExit(main())
