"""Which kernels transformers' layers use. What Liger's compute is compared in tests/gpu."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.config import load
from finetune.engine.kernels import liger
from finetune.engine.model import load_checks, loading
from finetune.errors import UserError
from finetune.runtime.bootstrap import Stack
from finetune.runtime.machine import hardware


def chosen(*words: str, kind: str = "llama", backend: str = "transformers", device: str = "cuda") -> Any:
    given = ["--model.model_name_or_path", "m", "--data.train_file", "x", "--model.full_finetuning", "true", *words]
    config = load(given, command="train")
    stack: Any = SimpleNamespace(device=device, backend=backend)
    return liger.choose(config, stack, SimpleNamespace(config=SimpleNamespace(model_type=kind)))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU host with the extra; Liger has no kernels for phi."""
    monkeypatch.setattr(liger, "why_unavailable", lambda device: None)
    monkeypatch.setattr(liger, "why_unsupported", lambda kind: "none" if kind == "phi" else None)
    monkeypatch.setattr(hardware, "has_bfloat16", lambda device: True)


def test_liger_is_not_imported_where_auto_leaves_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "why_unavailable", lambda device: None)
    monkeypatch.setattr(liger, "why_unsupported", lambda kind: pytest.fail("imports Liger"))
    assert chosen(kind="gemma2").kernels == "transformers"


@pytest.mark.usefixtures("installed")
def test_liger_is_used_where_it_was_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen().kernels == liger.LIGER
    assert chosen("--model.layer_kernels", "torch").kernels == "transformers"
    assert chosen("--training.torch_compile", "true").kernels == "transformers"
    assert chosen("--model.trust_remote_code", "true").kernels == "transformers"
    assert "layer_kernels: liger uses them" in chosen(kind="gemma2").reason
    for word in ("load_in_8bit", "load_in_fp8"):
        adapter = ("--model.full_finetuning", "false", f"--model.{word}", "true")
        assert "with 8-bit weights" in chosen(*adapter).reason
    assert "in float16" in chosen("--model.dtype", "float16").reason
    for words in ((), ("--model.load_in_4bit", "true")):
        assert chosen("--model.full_finetuning", "false", *words, kind="qwen3").kernels == liger.LIGER
    assert chosen("--model.layer_kernels", "liger", kind="gemma2").kernels == liger.LIGER
    assert chosen(backend="unsloth").kernels == "Unsloth"
    monkeypatch.setattr(hardware, "has_bfloat16", lambda device: False)  # a T4
    assert "in float16" in chosen().reason


@pytest.mark.usefixtures("installed")
def test_what_cannot_be_is_refused() -> None:
    wanted = ("--model.layer_kernels", "liger")
    for kind, backend in (("phi", "transformers"), ("llama", "unsloth")):
        with pytest.raises(UserError, match="liger .*, which this run cannot use: .*Remove the setting"):
            chosen(*wanted, kind=kind, backend=backend)


def test_what_no_model_can_have_is_refused_before_loading() -> None:
    stack = Stack(backend="transformers", reason="a test", device="cpu", local_rank=0, patches=())
    given = ["--model.model_name_or_path", "nobody/has-this", "--data.train_file", "x", "--model.layer_kernels"]
    with pytest.raises(UserError, match="there is no GPU. Remove the setting"):
        load_checks.check(load([*given, "liger"], command="train"), stack)
    load_checks.check(load([*given, "auto"], command="train"), stack)


def test_what_is_missing_is_said() -> None:
    assert vars(chosen(device="cpu")) == {"kernels": "transformers", "reason": "there is no GPU"}
    with pytest.raises(UserError, match="there is no GPU"):
        chosen("--model.layer_kernels", "liger", device="cpu")
    assert liger.why_unavailable("cpu") == "there is no GPU"


@pytest.mark.usefixtures("installed")
def test_a_loaded_model_gets_them(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[Any] = []
    monkeypatch.setattr(liger, "install", changed.append)
    words = ["--model.model_name_or_path", str(tiny_model), "--data.train_file", "t", "--model.full_finetuning", "true"]
    stack = Stack(backend="transformers", reason="a test", device="cpu", local_rank=0, patches=())
    found = [
        loading.load(load([*words, "--model.layer_kernels", one]), stack, row_length=64) for one in ("auto", "torch")
    ]
    assert len(changed) == 1 and changed[0] is found[0]
