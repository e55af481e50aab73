import json
from pathlib import Path


def check(folder: Path, output: str) -> None:
    """run.json has what is trained; in the second run nothing was."""
    covered = json.loads((folder / "out" / "run.json").read_text())["lora_coverage"]
    sizes = {"mlp.experts.gate_up_proj": 2 * 4 * 128 * 64, "mlp.experts.down_proj": 2 * 4 * 64 * 64}
    assert covered == {
        "share": 1.0,
        "experts": {name: {"experts": 4, "layers": 2, "parameters": size, "rank": 16} for name, size in sizes.items()},
    }
    assert not (folder / "no" / "run.json").exists()
