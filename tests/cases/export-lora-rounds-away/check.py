import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one.float() for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}


def check(folder: Path, output: str) -> None:
    """Of W + BA, bfloat16 keeps all of BA along BA, up to chance; to nearest it would keep a small part."""
    base, exact, merged, shards = (read(folder / name) for name in ("m", "exact", "merged", "shards"))
    adapter = load_file(folder / "out" / "adapter_model.safetensors")
    scale = json.loads((folder / "out" / "adapter_config.json").read_text())
    kept = {"merged": 0.0, "nearest": 0.0, "all": 0.0}
    for key, a in adapter.items():
        if "lora_A" not in key:
            continue
        update = adapter[key.replace("lora_A", "lora_B")] @ a * (scale["lora_alpha"] / scale["r"])
        name = key.removeprefix("base_model.model.").replace("lora_A.", "")
        assert torch.allclose(exact[name], base[name] + update, atol=1e-7)
        kept["all"] += float((update * update).sum())
        kept["merged"] += float(((merged[name] - base[name]) * update).sum())
        kept["nearest"] += float(((exact[name].bfloat16().float() - base[name]) * update).sum())
    assert kept["nearest"] < 0.5 * kept["all"], kept
    assert abs(kept["merged"] / kept["all"] - 1) < 0.1, kept
    assert all(torch.equal(merged[name], shards[name]) for name in merged)
    assert json.loads((folder / "exact" / "config.json").read_text())["dtype"] == "float32"
