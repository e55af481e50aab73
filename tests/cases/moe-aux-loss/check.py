import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def check(folder: Path, output: str) -> None:
    """Loss and gradients, the routers' too, are equal by any division into micro-batches: a step of SGD."""
    losses, weights = {}, {}
    for run in ("by2", "by6", "by48"):
        losses[run] = json.loads((folder / run / "run.json").read_text())["losses"]
        weights[run] = load_file(folder / run / "model.safetensors")
    before = load_file(folder / "m" / "model.safetensors")
    for run in ("by6", "by48"):
        torch.testing.assert_close(losses[run], losses["by2"], rtol=1e-5, atol=0)
        for name, value in weights["by2"].items():
            change, other = value - before[name], weights[run][name] - before[name]
            assert change.norm() > 0 and (change - other).norm() < 1e-3 * change.norm(), name
