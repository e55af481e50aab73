"""A saved tokenizer has the base's files, except for what the run changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from transformers import AutoTokenizer

from finetune.engine.checkpoint import tokenizer_files
from finetune.errors import UserError
from tests.cases import models
from tests.helpers import tiny


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """As transformers 4 wrote it, without a pad token, with a key and a file that version 5 does not write."""
    folder = models.make("tokenizer_of_v4", tmp_path / "base")
    edit(folder / "tokenizer_config.json", pad_token=None, add_bos_token=False)
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    (folder / "vocab.json").write_text("{}")
    return folder


@pytest.fixture(params=["noted", "not noted"])
def loaded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads a tokenizer, whose files as loaded are then known when it is saved, or are made by loading it again."""

    def load(folder: Path) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if request.param == "noted":
            tokenizer_files.note_loaded(tokenizer, str(folder), None)
            monkeypatch.setattr(tokenizer_files, "_save_pretrained_from", None)
        return tokenizer

    return load


def edit(file: Path, **values: Any) -> None:
    content = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def saved(tokenizer: Any, folder: Path) -> dict[str, bytes]:
    folder.mkdir()
    tokenizer_files.save(tokenizer, folder)
    return tokenizer_files.read(folder)


def test_an_unchanged_tokenizer_is_copied(base: Path, tmp_path: Path, loaded: Any) -> None:
    tokenizer = loaded(base)
    tokenizer.padding_side = "left"
    tokenizer("the cat", truncation=True, max_length=1)  # leaves its truncation in the tokenizer
    assert saved(tokenizer, tmp_path / "out") == tokenizer_files.read(base)


def test_what_is_saved_is_what_was_loaded(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what the name stands for: another revision than main was asked for, whose files change meanwhile."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository, before = tmp_path / "models--org--name", tokenizer_files.read(base)
    (repository / "refs").mkdir(parents=True)
    for revision in ("v1", "main"):
        shutil.copytree(base, snapshot := repository / "snapshots" / revision)
        (snapshot / "config.json").write_text("{}")
        (repository / "refs" / revision).write_text(revision)
    edit(snapshot / "tokenizer_config.json", eos_token="<|im_start|>")
    tokenizer = AutoTokenizer.from_pretrained(repository / "snapshots" / "v1")
    tokenizer.name_or_path = "org/name"
    tokenizer_files.note_loaded(tokenizer, "org/name", "v1")
    edit(repository / "snapshots" / "v1" / "tokenizer_config.json", eos_token="<|im_start|>")
    assert saved(tokenizer, tmp_path / "out") == before


def test_a_full_disk_is_left_for_save_to_report(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tokenizers' error of a full disk is an Exception, of no other class."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    full = lambda *_: (_ for _ in ()).throw(Exception("No space left"))  # noqa: E731
    monkeypatch.setattr(type(tokenizer), "save_pretrained", full)
    tokenizer_files.note_loaded(tokenizer, str(base), None)
    assert tokenizer not in tokenizer_files._as_loaded


def test_a_pad_token_is_added_to_the_base_s_files(base: Path, tmp_path: Path, loaded: Any) -> None:
    tokenizer = loaded(base)
    tokenizer.pad_token = tokenizer.eos_token
    found, before = saved(tokenizer, tmp_path / "out"), tokenizer_files.read(base)
    for name, content in before.items():
        expected = json.loads(content) if name in ("tokenizer_config.json", "special_tokens_map.json") else None
        if expected is None:
            assert found[name] == content
        else:
            assert json.loads(found[name]) == expected | {"pad_token": "<|im_end|>"}
    assert AutoTokenizer.from_pretrained(tmp_path / "out").pad_token == "<|im_end|>"


def test_another_template_replaces_the_base_s_wherever_that_is(base: Path, tmp_path: Path, loaded: Any) -> None:
    template = (base / "chat_template.jinja").read_text()
    (base / "chat_template.jinja").unlink()
    edit(base / "tokenizer_config.json", chat_template=template)
    tokenizer = loaded(base)
    assert tokenizer.chat_template == template
    tokenizer.chat_template = "{{ messages }}"
    found = saved(tokenizer, tmp_path / "out")
    assert found["chat_template.jinja"] == b"{{ messages }}"
    config = json.loads(found["tokenizer_config.json"])
    assert "chat_template" not in config
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert found["tokenizer.json"] == (base / "tokenizer.json").read_bytes()


def test_added_tokens_are_in_every_file_that_names_tokens(base: Path, tmp_path: Path, loaded: Any) -> None:
    tokenizer = loaded(base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    found = saved(tokenizer, tmp_path / "out")
    config = json.loads(found["tokenizer_config.json"])
    new = tokenizer.convert_tokens_to_ids("<|new|>")
    assert config["added_tokens_decoder"][str(new)]["content"] == "<|new|>"
    assert config["additional_special_tokens"] == ["<|new|>"]
    assert config["add_bos_token"] is False
    assert "vocab.json" not in found  # without the new token
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("<|new|>")["input_ids"] == [new]


def test_without_the_base_s_files_the_class_is_one_that_version_4_knows(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    made = tiny.make_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made.backend_tokenizer, eos_token="<|im_end|>")
    config = json.loads(saved(tokenizer, tmp_path / "out")["tokenizer_config.json"])
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not {"is_local", "local_files_only", "backend"} & config.keys()
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("the cat")["input_ids"] == made("the cat")["input_ids"]


@pytest.mark.parametrize("template", ["\ud800", {"default": "x", "../up": "y"}, {"default": "x", "n" * 300: "y"}])
def test_a_template_that_cannot_be_saved_is_an_error(base: Path, tmp_path: Path, loaded: Any, template: Any) -> None:
    tokenizer = loaded(base)
    tokenizer.chat_template = template
    with pytest.raises(UserError, match="cannot be saved.*model.chat_template"):
        saved(tokenizer, tmp_path / "out")
