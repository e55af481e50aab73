from pathlib import Path

import torch
from safetensors.torch import load_file


def check(folder: Path, output: str) -> None:
    """Three updates of 2e-5 are far below the spacing of bfloat16 at most weights; a checkpoint has them all."""
    before = load_file(folder / "m" / "model.safetensors")
    after = load_file(folder / "out" / "checkpoint-3" / "model.safetensors")
    layers = [name for name in before if "layers" in name and before[name].ndim == 2]
    changed = [(after[name].float() != before[name].float()).float().mean() for name in layers]
    assert torch.stack(changed).mean() > 0.99
