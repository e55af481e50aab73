"""The patch of embeddings that go to disk: on a fixture of the defect, and on the installed Unsloth."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from patches import core
from patches import unsloth_embeddings_on_disk as patch
from tests.helpers import launch


def offload(model: Any, temporary_location: str) -> None:
    """As the releases that have the defect do it: through a file in the folder that the model came from."""
    folder = Path(temporary_location) / model.config._name_or_path
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.get_output_embeddings().weight, folder / "output_embeddings.pt")
    kept = torch.nn.Linear(1, 1, bias=False)
    kept.weight = torch.load(folder / "output_embeddings.pt", map_location="cpu", mmap=True)
    model.set_output_embeddings(kept)


@pytest.fixture
def unsloth(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType(patch.MODULE)
    module.__dict__["offload_output_embeddings"] = offload
    monkeypatch.setitem(sys.modules, patch.MODULE, module)
    return module


def test_the_layer_stays_and_nothing_is_written(unsloth: types.ModuleType, tmp_path: Path) -> None:
    def attach() -> tuple[Any, Any]:
        layer = torch.nn.Linear(2, 3, bias=False)
        model = patch._Layers(torch.nn.Embedding(3, 2), layer, tmp_path / "model")
        unsloth.__dict__["offload_output_embeddings"](model, str(tmp_path / "temporary"))
        return model.get_output_embeddings(), layer

    after, before = attach()
    assert after is not before and list(tmp_path.rglob("*.pt"))  # into the model's own folder
    for file in tmp_path.rglob("*.pt"):
        file.unlink()
    assert [verdict.applied for verdict in core.run([patch])] == [True]
    after, before = attach()
    assert after is before and not list(tmp_path.rglob("*.pt"))
    assert [verdict.applied for verdict in core.run([patch])] == [False]


def test_nothing_is_looked_at_where_unsloth_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, patch.MODULE, raising=False)
    assert not patch.needed()


@pytest.mark.campaign
@pytest.mark.unsloth
@pytest.mark.process
def test_the_installed_unsloth(tmp_path: Path) -> None:
    """It has the defect, which is gone with the patch. Once a release is repaired, this says when to remove it."""
    script = (
        "import sys, unsloth; from patches import core, unsloth_embeddings_on_disk as patch;"
        "import unsloth.models.llama; print('FOUND', sorted(patch._loaded()[1]), [v.needed for v in core.run([patch])],"
        "patch.needed())"
    )
    done = launch.on_the_installed_unsloth(script, tmp_path)
    found = next((line for line in done.stdout.splitlines() if line.startswith("FOUND")), done.stderr[-4000:])
    assert found == f"FOUND {sorted(patch.NAMES)} [True] False", found
