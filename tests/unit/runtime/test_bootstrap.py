"""What is put in order before Unsloth is imported, and what its import may not change."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import logging
import os
import py_compile
import runpy
import sys
import warnings
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from finetune import train
from finetune.config import load
from finetune.engine.session import opening
from finetune.errors import UserError
from finetune.runtime import bootstrap

pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.mark.parametrize(("given", "seen"), [(None, "0"), ("2,3", "2"), ("1", "1"), ("", "")])
def test_one_process_sees_one_gpu(monkeypatch: pytest.MonkeyPatch, given: str | None, seen: str) -> None:
    """With more in sight, transformers wraps the model in DataParallel, and Unsloth's rewrite makes the loss an int."""
    if given is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    bootstrap.set_environment()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


def test_trl_is_no_hindrance_where_unsloth_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace())
    monkeypatch.delitem(sys.modules, "unsloth", raising=False)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "unsloth" else find(name))
    stack = bootstrap.start("auto")
    assert (stack.backend, stack.reason) == ("transformers", "Unsloth cannot run here: it is not installed")


@pytest.mark.unsloth
def test_trl_before_unsloth_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace())
    monkeypatch.delitem(sys.modules, "unsloth", raising=False)
    with pytest.raises(RuntimeError, match="trl was imported before Unsloth: in a training script"):
        bootstrap.start("auto")


def test_the_users_compiler_settings_survive_the_import_of_unsloth_which_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unsloth removes them and prints a banner; a module of that name here does the same."""
    lines = ["import os", *(f"os.environ.pop({name!r}, None)" for name in bootstrap.RESTORED), "print('patched')"]
    (tmp_path / "unsloth.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "unsloth", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/scratch/inductor")
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    assert bootstrap.import_unsloth() is None
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/scratch/inductor" and "TORCH_LOGS" not in os.environ
    assert capsys.readouterr() == ("", "")
    sys.modules.pop("unsloth")


@pytest.mark.parametrize(
    ("given", "at_start"),
    [({}, "expandable_segments:True"), ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64")],
    ids=["default", "the user's own"],
)
def test_the_allocator_is_configured_before_cuda_starts(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], at_start: str
) -> None:
    """torch reads the variable then, and never again; Unsloth would set it later."""
    import peft  # noqa: F401  it imports bitsandbytes, which would look for the pretended GPU
    import torch

    for name in bootstrap.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    read: list[str | None] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: read.append(os.environ.get("PYTORCH_ALLOC_CONF")))
    bootstrap.start("transformers")
    assert read == [at_start]


def test_an_older_name_of_the_variable_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    bootstrap.set_environment()
    assert "PYTORCH_ALLOC_CONF" not in os.environ


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"])
def test_a_profile_that_shards_the_model_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """accelerate sets these variables for its ranks. A run would go on as DDP, which may not fit."""
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(UserError, match="add `--training.strategy shard`"):
        bootstrap.start("transformers")


def test_unsloths_older_order_of_stacked_experts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own forward pass would take it, and this package's kernels not."""
    monkeypatch.setenv("UNSLOTH_MOE_LORA_B_LAYOUT", "grouped_by_expert")
    with pytest.raises(UserError, match="UNSLOTH_MOE_LORA_B_LAYOUT is grouped_by_expert: .* Unset it"):
        bootstrap.start("auto")


def test_libraries_do_not_warn_of_torchaos_kernels_while_they_are_imported() -> None:
    """Two lines per rank about other devices."""
    log = logging.getLogger("torchao")
    before = log.level
    with bootstrap.library_imports():
        assert not log.isEnabledFor(logging.WARNING) and log.isEnabledFor(logging.ERROR)
    assert log.level == before


def test_the_known_noise_of_libraries_is_left_out_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries' own calls: a resume with other rows per rank, and an Enum as torchao registers it."""
    from transformers import trainer_utils

    pytree = logging.getLogger("torch.utils._pytree")  # where torch 2.13 warns

    for name in bootstrap.NOISE:
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    heard: list[str] = []
    monkeypatch.setattr(logging.Logger, "callHandlers", lambda log, record: heard.append(record.getMessage()))

    def make_noise() -> None:
        args = SimpleNamespace(per_device_train_batch_size=2, n_gpu=1)
        trainer_utils.compare_trainer_and_checkpoint_args(args, SimpleNamespace(train_batch_size=4))
        pytree.warning("%s is an Enum subclass and is now natively supported by torch.compile as", Path)
        pytree.warning("something else")

    make_noise()
    assert len(heard) == 3 and "(from trainer_state.json)" in heard[0]
    heard.clear()
    bootstrap.leave_out_noise()
    bootstrap.leave_out_noise()
    make_noise()
    assert heard == ["something else"]
    assert all(len(logging.getLogger(name).filters) == 1 for name in bootstrap.NOISE)
    warnings.warn("`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead.", FutureWarning, stacklevel=1)
    keys = r"The following rank_pattern keys did not match any targeted module and were ignored: ['.*\\.gate_up_proj']."
    warnings.warn(keys, RuntimeWarning, stacklevel=1)
    with pytest.raises(FutureWarning):  # as all warnings are errors here
        warnings.warn("another one", FutureWarning, stacklevel=1)


def test_collections_leave_out_what_was_imported() -> None:
    gc.unfreeze()
    with bootstrap.library_imports():
        assert not gc.isenabled()
        with bootstrap.library_imports():
            pass
        assert not gc.isenabled()
        kept: list[object] = []
        kept.append(kept)
    assert gc.isenabled() and gc.get_freeze_count() > 1000
    assert not any(one is kept for one in gc.get_objects())


@pytest.mark.parametrize("kept", [None, "beside", "writable", "the user's", "shared", "rank 1", "no home"])
def test_bytecode_is_kept_where_the_libraries_have_none(
    kept: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container image with PYTHONDONTWRITEBYTECODE, whose packages were installed without bytecode."""
    if kept is None:
        bootstrap.start("transformers")  # so that the libraries' own bytecode is read
    cache, torch = tmp_path / "cache" / "bytecode", tmp_path / "torch.py"
    (tmp_path / "imported_later.py").touch()
    spec, find = importlib.util.spec_from_file_location("torch", torch), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "torch" else find(name))
    monkeypatch.setattr(sys, "pycache_prefix", "/mine" if kept == "the user's" else None)
    monkeypatch.setattr(sys, "dont_write_bytecode", kept != "writable")
    monkeypatch.setenv("FINETUNE_CACHE", str(cache.parent))
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "")
    bootstrap.keep_bytecode.cache_clear()
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items() if kept == "rank 1" else ():
        monkeypatch.setenv(name, value)
    if kept == "no home":
        monkeypatch.delenv("FINETUNE_CACHE")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    if kept == "beside":
        py_compile.compile(str(torch.with_name("imported_later.py")), importlib.util.cache_from_source(str(torch)))
    cache.mkdir(0o777 if kept == "shared" else 0o700, parents=True)
    cache.chmod(0o777 if kept == "shared" else 0o700)  # whoever may write there may run code here
    bootstrap.keep_bytecode() if kept else bootstrap.start("transformers")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imported_later", raising=False)
    importlib.import_module("imported_later")
    assert [one.stem.split(".")[0] for one in cache.rglob("*.pyc")] == ([] if kept else ["imported_later"])
    assert kept != "the user's" or not [*cache.iterdir()]
    prefix = str(sys.pycache_prefix)
    assert prefix.startswith(str(cache)) == (kept in (None, "rank 1"))
    (tmp_path / "lib-2.0.dist-info").mkdir()  # its files may have the times and sizes of those before
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    bootstrap.keep_bytecode.cache_clear()
    bootstrap.keep_bytecode()  # in a rank that this process starts, with another sys.path
    assert kept is not None or not sys.dont_write_bytecode
    assert kept is not None or str(sys.pycache_prefix).startswith(str(cache)) and sys.pycache_prefix != prefix


def test_a_run_keeps_the_bytecode_of_its_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(bootstrap, "keep_bytecode", lambda: called.append(True))
    runpy.run_path(train.__file__)
    assert called == [True]


def test_packages_are_scanned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(metadata, "packages_distributions", lambda: calls.append(1) or {"a": ["b"]})
    for _ in range(2):
        bootstrap.start("transformers")
    assert metadata.packages_distributions() == metadata.packages_distributions() == {"a": ["b"]}
    assert calls == [1]


def test_libraries_do_not_find_what_no_run_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in bootstrap.UNUSED:
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))

    def found(*_: object, **__: object) -> list[str]:
        return [name for name in bootstrap.UNUSED if importlib.util.find_spec(name)]

    monkeypatch.setattr(bootstrap, "start", found)
    words = ["--model.model_name_or_path", str(tmp_path), "--data.train_file", "rows.jsonl"]
    assert opening._start_backend(load(words), ()) == [] and found() == list(bootstrap.UNUSED)
    for others in ("--model.trust_remote_code true", "--logging.callbacks [a.b:c] --logging.trust_code true"):
        assert opening._start_backend(load([*words, *others.split()]), ()) == list(bootstrap.UNUSED)


def test_triton_hashes_its_files_if_it_has_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a thread that does not import it: two at once cannot."""
    made, asked = ModuleType("triton.runtime.cache"), []
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", made)
    monkeypatch.setattr(
        bootstrap.threading, "Thread", lambda target, **_: SimpleNamespace(start=lambda: asked.append(target))
    )
    bootstrap._hash_triton()
    made.triton_key = hash  # type: ignore[attr-defined]
    bootstrap._hash_triton()
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", None)  # type: ignore[arg-type]
    bootstrap._hash_triton()
    assert asked == [hash]
