"""`finetune prepare --step`: the rows that a run trains on in a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune import prepare
from finetune.engine.training.trainer import SFTTrainer
from tests.helpers import tiny
from tests.helpers.runs import Runs, in_this_process


def test_they_are_those_that_the_run_has_trained_on(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Packs, in the second epoch, in the order of the loader."""
    (tmp_path / "model").symlink_to(tiny_model)
    tiny.make_rows(tmp_path / "train.jsonl", 24)
    collated: list[list[str]] = []
    collate = SFTTrainer.collate_rows

    def note(self: Any, rows: Any, pack_length: int | None = None) -> Any:
        decode = self.processing_class.decode
        collated.append([decode(ids) for row in rows for ids, _ in row])
        return collate(self, rows, pack_length)

    words = ["--data.packing", "true", "--data.max_length", "128", "--data.pack_length", "256"]
    with in_this_process(monkeypatch, tmp_path):
        run = Runs(tmp_path, monkeypatch)
        with monkeypatch.context() as patched:
            patched.setattr(SFTTrainer, "collate_rows", note)
            losses = run(tmp_path / "out", *words, "--training.num_train_epochs", "2")["losses"]
        capsys.readouterr()
        last, given = len(losses), ["--config", str(tmp_path / "out" / "run.yaml"), "--step"]
        assert prepare.main([*given, str(last)]) == 0
        printed = capsys.readouterr().out.split(f"Step {last}, in epoch 2: {len(collated[-1])} documents\n")[1]
        record = tmp_path / "out" / "run.json"
        record.write_text(json.dumps(json.loads(record.read_text()) | {"packs": {"packed": False, "reason": "a leak"}}))
        assert prepare.main([*given, "1"]) == 0
        words = capsys.readouterr()
        assert "Packs are laid out again" not in words.out and "Step 1, in epoch 1: 4 documents\n" in words.out
        assert prepare.main([*given, "0"]) == 2
    assert "--step: expected an integer of at least 1, got '0'" in capsys.readouterr().err
    bare = printed.replace("⟦", "").replace("⟧", "").split()
    assert sorted(bare) == sorted(" ".join(collated[-1]).split())
    bare_words = ["--model.model_name_or_path", str(tmp_path / "model"), "--data.train_file"]
    assert prepare.main([*bare_words, str(tmp_path / "train.jsonl"), "--step", "1"]) == 2
    assert "give the run.yaml of the run" in capsys.readouterr().err
