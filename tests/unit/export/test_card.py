"""Tests of finetune/export/card.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from finetune.export import card, source
from tests.helpers.export import TOKEN, WARNINGS

pytestmark = WARNINGS


def test_the_card_has_names_instead_of_paths(run_folder: Path) -> None:
    found = source.find(run_folder)
    record = found.record
    record["config"]["data"] |= {"dataset_name": "org/data", "system_prompt": "private words"}
    record["config"]["training"] = {"max_steps": 3, "output_dir": "/home/me/out", "extra": {"tf32": True}}
    record["config"]["model"]["hub_token"] = TOKEN
    record |= {"versions": {"torch": "2.13"}, "losses": [2.0, 1.5], "eval_loss_before": 2.5}
    text = card.text(found, "merged", "all equal")
    for hidden in ("/home/me", str(run_folder.parent), "private words", TOKEN):
        assert hidden not in text
    for shown in ("rows.jsonl", "org/data", "max_steps: 3", "tf32: true", "1.2500", "torch 2.13", "all equal"):
        assert shown in text
    assert card.shortened("org/name") == "org/name" and card.shortened("C:\\a\\b.jsonl") == "b.jsonl"
    (hostile := run_folder / "a\n---\n# Evil\x1b[31m\u202e.jsonl").touch()
    record["config"]["data"] |= {"train_file": str(hostile)}
    text = card.text(replace(found, name=str(hostile)), "adapter", None)
    assert r"trained on: a\n---\n# Evil\x1b[31m\u202e.jsonl" in text and str(run_folder.parent) not in text
    assert card.shortened({"a": ["~/x/y", 3, "s3://bucket/key"]}) == {"a": ["y", 3, "s3://bucket/key"]}


def test_a_model_in_the_hubs_cache_has_its_name_on_the_hub(run_folder: Path) -> None:
    cached = "/home/me/.cache/huggingface/hub/models--our-lab--small-1.5/snapshots/0a1b2c"
    assert card.shortened(cached) == "our-lab/small-1.5"
    text = card.text(replace(source.find(run_folder), name=cached), "adapter", None)
    assert "base_model: our-lab/small-1.5\n" in text and "merged in float32, nothing" in text
    assert "vllm serve our-lab/small-1.5 --enable-lora --max-lora-rank 8 --lora-modules NAME=FOLDER" in text


def test_what_vllm_refuses_beside_its_base_is_served_merged(run_folder: Path) -> None:
    plain = {"r": 16, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none", "rank_pattern": {}}
    assert card.merged_only(plain | {"use_rslora": True, "modules_to_save": None}) is None
    wrong = {name: ["x"] for name in ("modules_to_save", "target_parameters", "use_dora", "bias", "alpha_pattern")}
    for name, value in (wrong | {"rank_pattern": {"x": 4}}).items():
        assert "Serve this adapter merged" in (card.merged_only(plain | {name: value}) or ""), name
    text = card.text(replace(source.find(run_folder), adapter=plain | {"use_dora": True}), "adapter", None)
    assert "refuses or misapplies DoRA." in text and "vllm serve" not in text
