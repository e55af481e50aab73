"""The fused loss of old unsloth_zoo releases, as published, without and with the patches.

    pip download --no-deps unsloth_zoo==2026.4.9 --dest wheels
    unzip -q wheels/unsloth_zoo-2026.4.9-*.whl -d zoo-2026.4.9
    python -m benchmarks.old_releases zoo-2026.4.9 [...]

Prints one line of JSON per release, each measured in a process of its own with the installed torch, on the GPU if there
is one. Only the file of the loss and what it imports are loaded: whole old releases ask for other versions of
transformers and trl, and for a GPU. The reference is torch's cross entropy of the same logits.
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


def one(folder: Path) -> dict[str, Any]:
    """The record of one release."""
    import torch

    import patches
    from patches import core

    compile_chunks = torch.cuda.is_available()  # a CPU needs a C++ compiler for that, and half a minute
    if not torch.cuda.is_available():
        os.environ["UNSLOTH_CE_LOSS_TARGET_GB"] = "1"  # else they ask the GPU for its free memory
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
    return record


def main() -> int:
    """Measure the releases given as folders."""
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
