"""Exports that every rank writes: on a module of our own with the defect, and on the installed Unsloth."""

from __future__ import annotations

import inspect
import sys
import types
from pathlib import Path

import pytest
import torch

from patches import core
from patches import unsloth_merged_export_ranks as patch
from tests.helpers import launch


class Model(torch.nn.Module):
    """One layer, and the folders that it was saved to."""

    def __init__(self, *, sharded: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.saved: list[str] = []
        if sharded:
            self.layer.weight.ds_id = 0  # type: ignore[attr-defined]  # what ZeRO-3 marks its parameters with

    def save_pretrained(self, folder: str) -> None:
        self.saved.append(folder)


def unsloth_generic_save_pretrained_merged(self, save_directory, tokenizer=None, save_method="merged_16bit"):
    self.save_pretrained(save_directory)
    return save_directory


def unsloth_save_pretrained_gguf(self, save_directory, tokenizer=None):
    self.save_pretrained(save_directory)
    return {"gguf_files": [save_directory]}


def unsloth_push_to_hub_gguf(self, repo_id, tokenizer=None):
    # As Unsloth has it: through the module's global, by keyword, using the result.
    result = sys.modules["unsloth.save"].unsloth_save_pretrained_gguf(self=self, save_directory=repo_id)
    return result["gguf_files"]


FUNCTIONS = (unsloth_generic_save_pretrained_merged, unsloth_save_pretrained_gguf, unsloth_push_to_hub_gguf)


@pytest.fixture
def save(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """`unsloth.save` with the defect, and `unsloth`, which has bound its names too."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("unsloth", "unsloth_zoo")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("unsloth", "unsloth.save"):
        module = types.ModuleType(name)
        module.__dict__.update({function.__name__: function for function in FUNCTIONS})
        monkeypatch.setitem(sys.modules, name, module)
    return sys.modules["unsloth.save"]


def be_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """This process is a rank of a group in which a collective would wait for ever."""

    def hang(*args, **kwargs):
        raise AssertionError("a collective")

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: rank)
    for name in ("barrier", "all_reduce", "broadcast_object_list", "monitored_barrier"):
        monkeypatch.setattr(torch.distributed, name, hang)


def test_without_the_patch_every_rank_writes(save: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert patch.needed()
    be_rank(monkeypatch, 1)
    model = Model()
    save.unsloth_generic_save_pretrained_merged(model, "out")
    assert model.saved == ["out"]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("holder", ["unsloth", "unsloth.save"])
def test_with_the_patch_rank_0_writes_alone(
    save: types.ModuleType, monkeypatch: pytest.MonkeyPatch, function, holder: str
) -> None:
    patch.apply()
    assert not patch.needed()
    export = getattr(sys.modules[holder], function.__name__)
    assert inspect.signature(export) == inspect.signature(function)  # Unsloth reads and prints these

    alone, first, second = Model(), Model(), Model()
    returned = export(alone, "out")
    be_rank(monkeypatch, 0)
    assert export(first, "out") == returned == function(Model(), "out")
    be_rank(monkeypatch, 1)
    assert export(second, "out") is None
    assert (alone.saved, first.saved, second.saved) == (["out"], ["out"], [])


def test_model_given_by_name(save: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    patch.apply()
    be_rank(monkeypatch, 1)
    model = Model()
    assert save.unsloth_save_pretrained_gguf(self=model, save_directory="out") is None
    assert model.saved == []


def test_model_spread_over_ranks_is_exported_by_all(save: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has to take part in gathering it; the exports inside that one do not decide again."""
    patch.apply()
    be_rank(monkeypatch, 1)
    model = Model(sharded=True)
    assert save.unsloth_push_to_hub_gguf(model, "out") == ["out"]
    assert model.saved == ["out"]

    def gathers_first(self, repo_id, tokenizer=None):
        del self.layer.weight.ds_id
        return save.unsloth_save_pretrained_gguf(self, repo_id)

    model = Model(sharded=True)
    assert patch._on_rank_0(gathers_first)(model, "out") == {"gguf_files": ["out"]}
    assert patch._on_rank_0(gathers_first)(model, "out") is None  # whole by now, and asked from outside


def test_export_that_fails_does_not_switch_the_patch_off(
    save: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch.apply()
    be_rank(monkeypatch, 0)
    with pytest.raises(TypeError):
        save.unsloth_save_pretrained_gguf(Model())
    be_rank(monkeypatch, 1)
    assert save.unsloth_save_pretrained_gguf(Model(), "out") is None


def test_applied_twice_is_applied_once(save: types.ModuleType) -> None:
    assert core.run([patch])[0].applied
    patched = dict(vars(save))
    patch.apply()
    assert vars(save) == patched
    assert not core.run([patch])[0].applied


def test_probe_is_silent_where_exports_ask_for_the_rank(
    save: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a repaired release may: the model is looked through, rank 0 saves, all meet. It is then left alone."""

    def repaired(self, save_directory, tokenizer=None):
        assert len(list(self.modules())) > 0
        if torch.distributed.get_rank() == 0:
            self.save_pretrained(save_directory)
        torch.distributed.barrier()

    monkeypatch.setattr(save, "unsloth_generic_save_pretrained_merged", repaired)
    monkeypatch.setattr(save, "unsloth_save_pretrained_gguf", repaired)
    before = dict(vars(save))
    assert not patch.needed()
    patch.apply()
    assert vars(save) == before


def test_probe_leaves_torch_as_it_was(save: types.ModuleType) -> None:
    before = dict(vars(torch.distributed))
    patch.needed()
    assert vars(torch.distributed) == before


def test_nothing_is_looked_at_where_unsloth_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in patch.EXPORTS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert not patch.needed()


RANKS = """
import sys
from pathlib import Path
import torch, unsloth
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from patches import core, unsloth_merged_export_ranks as patch

base, out, method = sys.argv[1:]
torch.distributed.init_process_group("gloo")
tokenizer = AutoTokenizer.from_pretrained(base)
torch.cuda.get_device_name = lambda *_: "none"  # the merge asks for it

def export(folder):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    if "unsloth_zoo.cpu.loader" in sys.modules:
        sys.modules["unsloth_zoo.cpu.loader"].FastCPUModel._attach(model)
    else:
        unsloth.save.patch_saving_functions(model)
    folder = Path(out) / f"{folder}-{torch.distributed.get_rank()}"
    model.save_pretrained_merged(str(folder), tokenizer, save_method=method)

export("without")
assert core.run([patch])[0].applied
export("with")
assert not core.run([patch])[0].needed
torch.distributed.destroy_process_group()
"""


@pytest.mark.unsloth
@pytest.mark.process
@pytest.mark.parametrize(
    "code, method, weights",
    [
        pytest.param("cpu", "lora", "adapter_model.safetensors", marks=pytest.mark.campaign),
        ("cuda", "merged_16bit", "model.safetensors"),
    ],
)
def test_installed_unsloth_on_two_ranks(code: str, method: str, weights: str, tiny_model: Path, tmp_path: Path) -> None:
    """Its CPU backend and its CUDA code, which has no GPU here: every rank writes, then rank 0 alone."""
    (tmp_path / "ranks.py").write_text(RANKS)
    done = launch.run(
        "2 ranks",
        [str(tiny_model), str(tmp_path / "out"), method],
        cache=tmp_path,
        script=tmp_path / "ranks.py",
        **(launch.CODE_FOR_GPUS if code == "cuda" else {}),
    )
    assert done.returncode == 0, done.stdout[-6000:]
    folders = {"with-0", "without-0", "without-1"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == folders
    assert {path.parent.name for path in (tmp_path / "out").rglob(weights)} == folders
