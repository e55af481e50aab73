"""`--dry-run`: the verdict, and that nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import launch, tiny
from tests.distributed.test_training import faulty


def arguments(model: Path, data: Path, *extra: str) -> list[str]:
    return [
        "--dry-run",
        "--model.model_name_or_path",
        str(model),
        "--data.train_file",
        str(data / "train.jsonl"),
        *extra,
    ]


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_go(tiny_model: Path, tmp_path: Path, kind: str) -> None:
    tiny.make_rows(tmp_path / "train.jsonl", 60)
    before = sorted(tmp_path.iterdir())
    extra = ["--model.full_finetuning"] if kind == "full" else []
    out, cache = tmp_path / "out", tmp_path / "cache"
    cache.mkdir()
    report = ["--json", str(cache / "dry.json"), "--training.output_dir", str(out)]
    done = launch.run("python", arguments(tiny_model, tmp_path, *extra, *report), cache=cache)
    assert done.returncode == 0, done.stdout[-4000:]
    words = " ".join(done.stdout.split())
    assert "GO. Nothing was kept." in words and "saved and reloaded" in words
    assert "accelerate launch" in words and "--dry-run" not in words.split("GO.")[1]
    assert "⟦" in words  # one example, its learnt part marked
    assert sorted(path for path in tmp_path.iterdir() if path != cache) == before
    verdict = json.loads((cache / "dry.json").read_text())
    assert verdict["go"] and len(verdict["losses"]) == 5
    lengths = json.loads(next((cache / "data").glob("*/entry.json")).read_text())["about"]["ledgers"]["train"]
    assert verdict["longest_row_tokens"] >= lengths["tokens"] / lengths["rows_kept"]


def test_no_go_where_the_loss_is_not_finite(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    done = faulty("python", arguments(tiny_model, tiny_data), tmp_path / "out", tmp_path, "nan", 0, 1)
    assert done.returncode == 1
    assert "NO-GO: The loss of step 2 is not finite" in " ".join(done.stdout.split())
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".dry-run*"))


def test_no_label_tokens_and_several_ranks_are_bad_input(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    done = launch.run("python", arguments(tiny_model, tmp_path), cache=tmp_path)
    assert done.returncode == 2 and "none of the 1 rows has a token to learn" in done.stdout
    done = launch.run("cpu_2.yaml", arguments(tiny_model, tiny_data), cache=tmp_path)
    assert done.returncode != 0 and "--dry-run tries one device" in done.stdout
