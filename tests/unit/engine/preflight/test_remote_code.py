"""Models that bring code: refused in a sentence that names the file and the key, and nothing of it runs."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from finetune.config import load
from finetune.engine.model import load_errors, tokenizer_loading
from finetune.engine.preflight import config_checks, remote_code
from finetune.errors import UserError


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def config(folder: Path, *extra: str):
    return load(["--model.model_name_or_path", str(folder), "--data.train_file", "x.jsonl", *extra])


def bring_code(folder: Path, file: str, marker: Path, **changes: object) -> None:
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    path = folder / file
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | changes))


def test_code_of_a_model_is_refused_before_anything_is_loaded(folder: Path, tmp_path: Path) -> None:
    code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    bring_code(folder, "config.json", tmp_path / "ran", auto_map=code, model_type="strange")
    with pytest.raises(UserError, match=r"config.json asks to run .*evil.Config.* model.trust_remote_code: true"):
        config_checks.check_model(config(folder))
    config_checks.check_model(config(folder, "--model.trust_remote_code"))  # allowed
    bring_code(folder, "config.json", tmp_path / "ran", model_type="llama")  # transformers' own class is taken
    config_checks.check_model(config(folder))
    assert not (tmp_path / "ran").exists()


def test_code_of_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    code = {"AutoTokenizer": ["evil.Tokenizer", None]}
    bring_code(folder, "tokenizer_config.json", tmp_path / "ran", auto_map=code, tokenizer_class="Tokenizer")
    bring_code(folder, "config.json", tmp_path / "ran", model_type="strange")
    with pytest.raises(UserError, match=r"tokenizer_config.json asks to run .*evil.Tokenizer.*trust_remote_code: true"):
        tokenizer_loading.load_tokenizer(config(folder))
    assert not (tmp_path / "ran").exists()


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_pickled_weights_that_run_code(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Evil(tmp_path / "ran")}, folder / "pytorch_model.bin")
    from transformers import AutoModelForCausalLM

    with (
        pytest.raises(UserError, match=r"pytorch_model.bin cannot be read as plain weights.*safetensors"),
        load_errors.explain_load_error(str(folder), "model"),
    ):
        AutoModelForCausalLM.from_pretrained(folder)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(UserError, match="could run code"):
        remote_code.explain_refused_code(str(folder), "model", pickle.UnpicklingError("x"))


def test_other_errors_pass(folder: Path) -> None:
    for error in (OSError("no file"), ValueError("Unrecognized model")):
        remote_code.explain_refused_code(str(folder), "model", error)
