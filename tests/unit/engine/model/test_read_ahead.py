"""The model's files are read while the libraries are imported: those that will be loaded, once per machine."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from finetune import train
from finetune.config import Config, load
from finetune.engine.model import read_ahead
from finetune.engine.session import opening
from finetune.runtime.ranks import distributed


def config_of(folder: Path, *words: str) -> Config:
    return load(["--model.model_name_or_path", str(folder), "--data.train_file", "t", *words], command="train")


def stored(folder: Path, *names: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name in names:
        (folder / name).write_bytes(b"x" * 100)
    return folder


def test_one_file_or_those_of_the_index(tmp_path: Path) -> None:
    one = stored(tmp_path / "one", "model.safetensors", "consolidated.safetensors", "pytorch_model.bin")
    assert read_ahead.weights(one) == [one / "model.safetensors"]
    parts = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    two = stored(tmp_path / "two", "consolidated.safetensors", *parts)
    named = {"a": parts[0], "b": parts[1], "c": parts[0], "d": "absent.safetensors"}
    (two / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    assert read_ahead.weights(two) == [two / name for name in parts]
    (two / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"e": "../one/model.safetensors"}}))
    assert read_ahead.weights(two) == []
    assert read_ahead.weights(stored(tmp_path / "none")) == []


def test_every_byte_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stored(tmp_path / "m", "model.safetensors")
    monkeypatch.setattr(read_ahead, "BLOCK_BYTES", 30)
    monkeypatch.setattr(read_ahead, "free_bytes", lambda: 1000)
    read: list[int | None] = []

    class Watched(io.FileIO):
        def readinto(self, block: Any) -> int | None:
            read.append(super().readinto(block))
            return read[-1]

    monkeypatch.setattr(read_ahead, "open_regular", Watched)
    thread = read_ahead.start(config_of(folder))
    assert thread is not None and thread.daemon
    thread.join()
    assert read == [30, 30, 30, 10, 0]


def test_nothing_is_read_by_other_ranks_without_room_or_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stored(tmp_path / "m", "model.safetensors")
    assert read_ahead.start(load([], command="train")) is None  # the demo
    assert read_ahead.start(config_of(Path("nobody/has-this"))) is None
    monkeypatch.setattr(read_ahead, "free_bytes", lambda: 199)
    assert read_ahead.start(config_of(folder)) is None
    monkeypatch.setattr(read_ahead, "free_bytes", lambda: 200)
    assert read_ahead.start(config_of(folder)) is not None
    other = distributed.Ranks(rank=3, local_rank=1, world_size=4, local_world_size=2)
    monkeypatch.setattr(distributed, "ranks", lambda: other)
    assert read_ahead.start(config_of(folder)) is None


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [tmp_path / name for name in ("absent", "none", "some")]
    limits[1].write_text("max\n")
    monkeypatch.setattr(read_ahead, "LIMITS", tuple(limits[:2]))
    assert read_ahead.free_bytes() > 1000
    limits[2].write_text("1000\n")
    monkeypatch.setattr(read_ahead, "LIMITS", tuple(limits))
    assert read_ahead.free_bytes() == 1000


def test_a_damaged_index_is_left_to_the_loader(tmp_path: Path) -> None:
    folder = stored(tmp_path / "m", "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text("{")
    assert read_ahead.start(config_of(folder)) is None


def test_a_run_begins_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the libraries are imported."""
    folder = stored(tmp_path / "m", "model.safetensors")
    order: list[str] = []
    monkeypatch.setattr(opening, "check_present", lambda config: order.append("present"))
    monkeypatch.setattr(read_ahead, "start", lambda config: order.append("read"))
    monkeypatch.setattr(train.strategy, "apply", lambda config: order.append("begin"))
    monkeypatch.setattr(opening, "resolve_demo", lambda config: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        train.run(config_of(folder))
    assert order == ["present", "read", "begin"]
