"""run.json has the share that the names of the saved adapter's weights give."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM


def check(folder: Path, output: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "m"))
    sizes = {
        name: module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    for run, layers in (("out", 3), ("all", len(sizes))):
        with safe_open(folder / run / "adapter_model.safetensors", "pt") as file:
            adapted = {key.removeprefix("base_model.model.").split(".lora_")[0] for key in file.keys()}
        assert len(adapted) == layers and adapted <= sizes.keys()
        share = sum(sizes[name] for name in adapted) / sum(sizes.values())
        assert json.loads((folder / run / "run.json").read_text())["lora_coverage"] == {
            "share": pytest.approx(share),
            "experts": {},
        }
