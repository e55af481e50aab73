import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def check(folder: Path, output: str) -> None:
    """The resumed run ends with the weights of the one that was not interrupted, the experts' too."""
    before, whole, resumed = (load_file(folder / name / "model.safetensors") for name in ("m", "whole", "resumed"))
    assert whole.keys() == resumed.keys() == before.keys()
    for name, value in whole.items():
        assert not torch.equal(value, before[name]), name
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=0, msg=name)
    losses = [json.loads((folder / name / "run.json").read_text())["losses"] for name in ("whole", "resumed")]
    assert losses[1] == losses[0][1:]
