"""Tests of finetune/chat/load.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune import chat
from finetune.chat import load as loading
from finetune.engine.checkpoint import run_artifacts
from finetune.errors import UserError
from tests.helpers import export, tiny


def test_a_run_that_has_not_finished_stands_for_its_newest_complete_checkpoint(copy: Path) -> None:
    record = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps(record | {"status": "interrupted"}))
    found = run_artifacts.find_trained_model(copy)
    assert found.folder.name == "checkpoint-4" and "interrupted" in str(found.note) and found.base is not None
    (copy / "checkpoint-4" / "adapter_model.safetensors").unlink()
    assert run_artifacts.find_trained_model(copy).folder.name == "checkpoint-2"
    assert run_artifacts.find_trained_model(copy / "checkpoint-2").note is None
    assert run_artifacts.find_trained_model(copy / "checkpoint-2").base_digest == record["settings"]["base weights"]


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


def other_base(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    base = tiny.make_model(folder / "other", seed=9)
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(base)}))


def lost_base(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "someone/lost"}))


def evil_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for a in range(10**9) %}{% endfor %}")


@pytest.mark.parametrize(
    ("name", "spoil", "expected"),
    [
        ("nowhere", lambda folder: None, r"^error: no such folder: .*nowhere\. Give the output_dir"),
        ("run.json", lambda folder: None, r"^error: not a folder: .*run\.json\. Give"),
        ("runs", lambda folder: None, r"^error: not a run: .*runs has no run\.json.*Give the output_dir"),
        (".", lambda f: (f / "run.json").write_text("{"), r"^error: .*run\.json cannot be read: .*Restore it"),
        (".", lambda f: (f / "run.json").write_text("[]"), r"^error: .*run\.json must be a JSON object"),
        (".", lambda f: truncate(f / "adapter_model.safetensors"), r"adapter_model\.safetensors is damaged: it has"),
        (".", lambda f: (f / "adapter_config.json").write_text("{}"), r"no peft_type"),
        (".", lambda f: (f / "tokenizer.json").write_text("{}"), r"^error: the tokenizer cannot be loaded: "),
        (".", other_base, r"weights are not those that .* was trained on\. Give the folder .*--base"),
        (".", lost_base, r"base model of .* is someone/lost: .*HF_HUB_OFFLINE is set\. Give its folder with --base"),
        (".", evil_template, r"chat template .* was stopped"),
        (".", lambda f: (f / "chat_template.jinja").write_text("{{ x.y }}"), r"chat template of .* fails: "),
        ("checkpoint-9", lambda folder: (folder / "checkpoint-9").mkdir(), r"not a complete checkpoint: .*it has no"),
        ("checkpoint-4", lambda f: flip(f / "checkpoint-4/adapter_model.safetensors"), r"does not match its checksum"),
        ("checkpoint-4", lambda f: (f / "checkpoint-4/tokenizer.json").unlink(), r"tokenizer\.json is missing.*check"),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_sentence(
    copy: Path, prompts: Path, name: str, spoil: Any, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(copy)
    assert chat.main([str(copy / name), "--prompts", str(prompts)]) == 2
    printed = capsys.readouterr().err
    assert re.search(expected, printed) and printed.count("\n") == 1, printed


def test_a_run_that_saved_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"status": "failed"}))
    with pytest.raises(UserError, match=r"^nothing is saved in .*: the run is failed, without a final model"):
        run_artifacts.find_trained_model(tmp_path)


def test_code_of_the_run_s_tokenizer_needs_permission(copy: Path, tmp_path: Path, prompts: Path, capsys: Any) -> None:
    """run.json may say that code was allowed in training; that permits nothing here."""
    (copy / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = json.loads((copy / "tokenizer_config.json").read_text())
    changed = {"auto_map": {"AutoTokenizer": ["evil.T", None]}, "tokenizer_class": "Strange"}
    (copy / "tokenizer_config.json").write_text(json.dumps(config | changed))
    record = json.loads((copy / "run.json").read_text())
    record["config"]["model"]["trust_remote_code"] = True
    (copy / "run.json").write_text(json.dumps(record))
    chat.main([str(copy), "--prompts", str(prompts), "--max-new-tokens", "2"])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("asked_for", "trained_by", "base", "gpu", "expected"),
    [
        ("auto", "unsloth", None, True, "auto"),
        ("auto", "unsloth", "BASE", True, "auto"),
        ("auto", "unsloth", None, False, "transformers"),
        ("auto", "transformers", None, True, "transformers"),
        ("auto", "unsloth", "elsewhere", True, "transformers"),
        ("transformers", "unsloth", None, True, "transformers"),
        ("unsloth", "transformers", None, False, "unsloth"),
    ],
)
def test_which_backend_answers(
    asked_for: str,
    trained_by: str,
    base: str | None,
    gpu: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    adapter = {"base_model_name_or_path": "BASE"}
    found = run_artifacts.TrainedModel(given=tmp_path, folder=tmp_path, adapter=adapter, record={"backend": trained_by})
    assert loading.choose_backend(asked_for, found, base) == expected


def test_unsloth_is_refused_for_what_it_would_not_load(tmp_path: Path) -> None:
    full = run_artifacts.TrainedModel(given=tmp_path, folder=tmp_path, adapter=None)
    assert loading.choose_backend("auto", full, None) == "transformers"
    with pytest.raises(UserError, match="only supports adapters"):
        loading.choose_backend("unsloth", full, None)
    adapter = {"base_model_name_or_path": "BASE"}
    with pytest.raises(UserError, match=r"names \(BASE\), and --base is elsewhere"):
        loading.choose_backend(
            "unsloth", run_artifacts.TrainedModel(given=tmp_path, folder=tmp_path, adapter=adapter), "elsewhere"
        )


def test_a_mixture_of_experts_answers_as_its_merged_export(tmp_path: Path) -> None:
    base = export.make_base(tmp_path / "base", "qwen3-moe", torch.float32)
    lora = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    export.make_run(tmp_path / "run", base, **lora)
    export.merge(tmp_path / "run", base, tmp_path / "merged")
    for file in (*base.glob("*token*"), base / "chat_template.jinja"):
        (tmp_path / "merged" / file.name).write_bytes(file.read_bytes())
    given = ["--backend", "transformers", "--max-new-tokens", "12", "--prompts", str(tmp_path / "prompts.txt")]
    (tmp_path / "prompts.txt").write_text("the cat runs\nsing\n")
    answers = []
    for folder in ("run", "merged", "base"):
        assert chat.main([str(tmp_path / folder), "--json", str(tmp_path / "found.json"), *given]) == 0
        found = json.loads((tmp_path / "found.json").read_text())
        answers.append([one["answer"] for one in found["answers"]])
    assert answers[0] == answers[1] != answers[2]
